"""The committed ``static/dist/app.js`` belongs to ``static/js``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from scripts import static_bundle


def test_the_committed_bundle_is_of_these_sources() -> None:
    found = static_bundle.recorded()
    assert found == static_bundle.digest(), "static/js has changed since: run `make static`"


def test_it_is_what_the_tools_make() -> None:
    """Nothing was written into it by hand, and the pinned tools made it."""
    if static_bundle.tools() is None:
        assert not os.environ.get("CI"), "expected esbuild and terser, which `make check` installs"
        pytest.skip("no esbuild and terser here")
    assert static_bundle.made() == static_bundle.BUNDLE.read_text(), "run `make static`"


def test_whatever_changes_in_the_sources_is_seen(tmp_path: Path) -> None:
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


def test_a_bundle_without_the_digest_belongs_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "app.js").write_text("export {};\n")
    assert static_bundle.recorded(tmp_path / "app.js") is None


def test_a_mistake_in_the_sources_is_told_in_the_tool_s_words(tmp_path: Path) -> None:
    if static_bundle.tools() is None:
        pytest.skip("no esbuild and terser here")
    (tmp_path / "app.js").write_text('import "./missing.js";\n')
    with pytest.raises(RuntimeError, match=r"Could not resolve"):
        static_bundle.made(tmp_path)
