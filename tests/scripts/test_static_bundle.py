"""The committed scripts of ``static/dist`` are built from ``static/js``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from scripts import static_bundle


@pytest.mark.parametrize("name", static_bundle.ENTRIES)
def test_the_committed_bundle_has_the_digest_of_the_sources(name: str) -> None:
    recorded = static_bundle.recorded(static_bundle.DIST / name)
    assert recorded == static_bundle.digest(), "static/js has changed: run `make static`"


@pytest.mark.parametrize(("name", "entry"), static_bundle.ENTRIES.items())
def test_a_rebuild_gives_the_committed_bundle(name: str, entry: str) -> None:
    if static_bundle.tools() is None:
        assert not os.environ.get("CI"), "expected esbuild and terser, which `make check` installs"
        pytest.skip("no esbuild and terser here")
    committed = (static_bundle.DIST / name).read_text()
    assert static_bundle.build(entry) == committed, "run `make static`"


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


def test_a_bundle_without_a_digest_is_not_accepted(tmp_path: Path) -> None:
    (tmp_path / "app.js").write_text("export {};\n")
    assert static_bundle.recorded(tmp_path / "app.js") is None


def test_an_error_in_the_sources_is_reported_with_the_tools_message(tmp_path: Path) -> None:
    if static_bundle.tools() is None:
        pytest.skip("no esbuild and terser here")
    (tmp_path / "app.js").write_text('import "./missing.js";\n')
    with pytest.raises(RuntimeError, match=r"Could not resolve"):
        static_bundle.build("app.js", tmp_path)
