"""The committed scripts of ``static/dist`` are built from ``static/js``."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from scripts import static_bundle


def test_the_committed_scripts_have_the_digest_of_the_sources() -> None:
    manifest = json.loads((static_bundle.DIST / static_bundle.MANIFEST).read_text())
    assert manifest["sources"] == static_bundle.digest(), "static/js has changed: run `make static`"


def test_a_rebuild_gives_the_committed_scripts() -> None:
    if static_bundle.tools() is None:
        assert not os.environ.get("CI"), "expected esbuild, which `make check` installs"
        pytest.skip("no esbuild here")
    committed = {path.name: path.read_text() for path in static_bundle.DIST.iterdir()}
    assert static_bundle.build() == committed, "run `make static`"


def test_every_change_of_the_sources_changes_the_digest(tmp_path: Path) -> None:
    sources = tmp_path / "js"
    shutil.copytree(static_bundle.SOURCES, sources)
    digests = [static_bundle.digest(sources)]
    assert digests == [static_bundle.digest()]
    (sources / "run.js").write_text((sources / "run.js").read_text() + "\n")
    digests.append(static_bundle.digest(sources))
    (sources / "run.js").rename(sources / "runner.js")
    digests.append(static_bundle.digest(sources))
    (sources / "run.js").write_text("")
    digests.append(static_bundle.digest(sources))
    assert len(set(digests)) == 4


def test_a_page_loads_the_chunks_that_it_imports_at_once() -> None:
    outputs = {
        "run.js": [("import-statement", "a.js"), ("dynamic-import", "tab.js")],
        "a.js": [("import-statement", "b.js")],
        "b.js": [("import-statement", "a.js")],
        "tab.js": [],
    }
    meta = {
        name: {"imports": [{"kind": kind, "path": f"dist/{path}"} for kind, path in imports]}
        for name, imports in outputs.items()
    }
    assert static_bundle.loaded_with("run.js", meta) == ["run.js", "a.js", "b.js"]


def test_an_error_in_the_sources_is_reported_with_the_tools_message(tmp_path: Path) -> None:
    if static_bundle.tools() is None:
        pytest.skip("no esbuild here")
    (tmp_path / "base.js").write_text('import "./missing.js";\n')
    with pytest.raises(RuntimeError, match=r"Could not resolve"):
        static_bundle.build(tmp_path)


def test_lines_of_the_sources_are_short() -> None:
    """The modules are for readers: esbuild makes them small."""
    long = [
        f"{path.relative_to(static_bundle.SOURCES)}:{number}"
        for path in sorted(static_bundle.SOURCES.rglob("*.js"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 100
    ]
    assert not long, f"expected at most 100 columns: {long}"
