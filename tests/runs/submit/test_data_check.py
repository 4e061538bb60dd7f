"""Data on this machine: only below a data root, and nothing else is revealed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from runs.submit import data_check
from runs.submit.bucket_check import check_data


@pytest.fixture
def root(tmp_path: Path, settings: Any) -> Path:
    made = tmp_path / "data"
    made.mkdir()
    (made / "corpus.txt").write_text("text")
    (tmp_path / "secret").write_text("key")
    settings.DATA_ROOTS = [made]
    return made


def test_data_below_a_root_is_found(root: Path) -> None:
    assert check_data(str(root / "corpus.txt")) == []
    assert check_data((root / "corpus.txt").as_uri()) == []
    assert check_data(str(root)) == []
    assert check_data(f"{root}/*.txt") == []
    assert "found nothing" in check_data(f"{root}/*.json")[0]


def test_the_answer_is_the_same_whether_a_file_outside_exists_or_not(root: Path) -> None:
    for name in ("secret", "no-such-file"):
        for uri in (
            str(root.parent / name),
            f"file://{root}/../{name}",
            f"local://{root}/../{name}",
        ):
            [problem] = check_data(uri)
            assert "outside of the data folders" in problem
            assert name not in problem


def test_a_link_that_leads_out_is_not_followed(root: Path) -> None:
    os.symlink(root.parent / "secret", root / "link")
    assert "outside of the data folders" in check_data(str(root / "link"))[0]
    os.symlink(root.parent / "secret", root / "[a]")
    (root / "corpus.txt").unlink()
    assert "found nothing" in check_data(str(root))[0]


@pytest.mark.parametrize(
    "uri", ["{root}/*/../../secret", "{root}/*/../../no-such", "file://{root}/[a-z]*/%2e%2e/../s*"]
)
def test_a_pattern_that_leads_out_is_refused_without_a_search(root: Path, uri: str) -> None:
    (root / "folder").mkdir()
    assert "'..' after a pattern" in check_data(uri.format(root=root))[0]


def test_a_pattern_over_links_reveals_nothing_outside(root: Path) -> None:
    os.symlink(root.parent, root / "up")
    answers = {check_data(f"{root}/*/{n}")[0].replace(n, "") for n in ("secret", "no-such")}
    assert len(answers) == 1


@pytest.mark.parametrize("uri", ["/**/*", "file:///**/*.txt", "{root}/**"])
def test_patterns_that_search_whole_trees_are_refused(root: Path, uri: str) -> None:
    assert "searches whole trees" in check_data(uri.format(root=root))[0]


def test_patterns_above_a_root_are_refused_without_a_walk(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_check.glob, "iglob", lambda *_: pytest.fail("walked"))
    for uri in ("/*/*", f"{root.parent}/*/corpus.txt", f"{root}/../*", "/[e]tc/passwd"):
        assert "outside of the data folders" in check_data(uri)[0]


@pytest.mark.parametrize(
    "uri",
    [
        "simplecache::http://127.0.0.1/",
        "zip://x::file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "github://o:r@/x",
        "memory://x",
        "sftp://127.0.0.1/x",
        "reference://x",
        "FILE:///etc/passwd",
    ],
)
def test_other_file_systems_and_chains_are_refused(root: Path, uri: str) -> None:
    assert data_check.refuse_data(uri)


def test_large_folders_are_not_walked_to_their_end(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        (root / f"empty-{number:02}").touch()
    (root / "corpus.txt").unlink()
    looked_at: list[str] = []
    monkeypatch.setattr(data_check, "FILES", 5)
    monkeypatch.setattr(data_check.os.path, "getsize", lambda name: looked_at.append(name) or 0)
    assert "found only empty files" in check_data(str(root))[0]
    assert len(looked_at) == 5
