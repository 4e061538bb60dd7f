"""The text corpus: reading, splitting and errors."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import fsspec
import numpy as np
import pytest

from diloco.protocol.settings import SettingsError
from diloco.protocol.workload import STDLIB
from diloco.workloads import text
from diloco.workloads.text import HELD_OUT, Corpus, load_corpus

CONTEXT = 16


def load(source: Path | str, *, shard: int = 0, shards: int = 1, eval_bytes: int = 512) -> Corpus:
    return load_corpus(
        str(source), shard=shard, shards=shards, context=CONTEXT, eval_bytes=eval_bytes
    )


def unique_text(count: int, salt: str = "") -> bytes:
    """``count`` bytes in which no 16 bytes occur twice."""
    lines = (hashlib.sha256(f"{salt}/{i}".encode()).hexdigest() for i in itertools.count())
    return "\n".join(itertools.islice(lines, count // 65 + 1)).encode()[:count]


def windows(data: np.ndarray, length: int = CONTEXT) -> set[bytes]:
    raw = data.tobytes()
    return {raw[i : i + length] for i in range(len(raw) - length + 1)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """200 files, enough for the hash of their names to hold some out."""
    for i in range(200):
        path = tmp_path / "text" / f"part{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(unique_text(1000 + i, salt=str(i)))
    return tmp_path / "text"


def test_stdlib_is_source_text_without_tests() -> None:
    corpus = load(STDLIB, shards=16, eval_bytes=4096)
    assert corpus.text_bytes > 5_000_000
    assert corpus.train.nbytes == pytest.approx(corpus.text_bytes * 0.95 / 16, rel=0.1)
    assert corpus.train.dtype == corpus.held_out.dtype == np.uint8
    names = [file.name for file in text._stdlib_files()[1]]
    assert "argparse.py" in names
    assert "json/decoder.py" in names
    assert not [n for n in names if {"site-packages", "test", "tests"} & set(n.split("/"))]
    held_out = [file.size for file in text._stdlib_files()[1] if file.held_out]
    assert HELD_OUT / 2 < sum(held_out) / corpus.text_bytes < HELD_OUT * 2


@pytest.mark.parametrize("pieces", ["many files", "one file"])
def test_shards_and_held_out_are_disjoint_and_cover_the_text(folder: Path, pieces: str) -> None:
    source = folder
    if pieces == "one file":
        source = folder.parent / "one.txt"
        source.write_bytes(unique_text(200_000))
    corpora = [load(source, shard=shard, shards=5, eval_bytes=10**6) for shard in range(5)]
    parts = [corpus.train for corpus in corpora]
    assert len({part.size for part in parts}) == 1
    # A shard concatenates blocks, so only windows across a seam are not in the text.
    result = [windows(part) for part in parts] + [set().union(*map(windows, corpora[0].held_out))]
    for one, other in itertools.combinations(result, 2):
        assert not one & other
    covered = sum(part.size for part in parts) + corpora[0].held_out.size
    assert covered > 0.95 * corpora[0].text_bytes
    for corpus in corpora[1:]:
        assert np.array_equal(corpus.held_out, corpora[0].held_out)


@pytest.mark.parametrize("count", [1, 2, 400])
def test_every_byte_is_either_trained_on_or_held_out(count: int) -> None:
    files = [text.TextFile(path=f"/{i}", name=f"{i}", size=100 + i) for i in range(count)]
    result = [
        (extent.path, position)
        for part in text._split(files)
        for extent in part
        for position in range(extent.start, extent.start + extent.length)
    ]
    assert len(result) == len(set(result)) == sum(file.size for file in files)
    held_out = sum(extent.length for extent in text._split(files)[1])
    assert HELD_OUT / 4 <= held_out / len(result) <= HELD_OUT * 4


def test_equal_calls_load_equal_corpora(folder: Path) -> None:
    one, other = load(folder, shard=2, shards=4), load(folder, shard=2, shards=4)
    assert np.array_equal(one.train, other.train)
    assert np.array_equal(one.held_out, other.held_out)


def test_a_held_out_file_stays_held_out_when_files_are_added(folder: Path) -> None:
    held_out = {file.name for file in text._uri_files(str(folder))[1] if file.held_out}
    (folder / "part0" / "new.txt").write_text("one more")
    again = {file.name for file in text._uri_files(str(folder))[1] if file.held_out}
    assert held_out
    assert held_out <= again


def test_evaluation_windows_are_spread_and_predict_no_byte_twice() -> None:
    spans = text.window_spans(100_000, CONTEXT, 1600)
    assert len(spans) == 100
    assert spans[0][0] == 0
    assert spans[-1][1] == 100_000
    assert all(later[0] >= earlier[0] + CONTEXT for earlier, later in itertools.pairwise(spans))
    short = text.window_spans(CONTEXT * 3 + 1, CONTEXT, 10**9)
    assert [start for start, _ in short] == [0, CONTEXT, 2 * CONTEXT]


def test_file_folder_glob_and_store_give_the_same_text(folder: Path, tmp_path: Path) -> None:
    by_path = load(folder, shard=1, shards=2)
    by_uri = load(folder.as_uri(), shard=1, shards=2)
    memory = fsspec.filesystem("memory")
    for path in folder.rglob("*.txt"):
        memory.pipe_file(f"/corpus/{path.relative_to(folder).as_posix()}", path.read_bytes())
    try:
        by_store = load("memory://corpus", shard=1, shards=2)
    finally:
        memory.rm("/corpus", recursive=True)
    by_glob = load(f"{folder}/**/*.txt", shard=1, shards=2)
    for other in (by_uri, by_store, by_glob):
        assert np.array_equal(by_path.train, other.train)
        assert np.array_equal(by_path.held_out, other.held_out)


def test_big_files_are_read_by_ranges(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(folder, shard=1, shards=3)
    monkeypatch.setattr(text, "_WHOLE_FILE", 0)
    by_ranges = load(folder, shard=1, shards=3)
    assert np.array_equal(whole.train, by_ranges.train)
    assert np.array_equal(whole.held_out, by_ranges.held_out)


def test_hidden_and_empty_files_are_skipped(folder: Path) -> None:
    before = load(folder)
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("[core]" * 1000)
    (folder / "part0" / "empty.txt").touch()
    assert load(folder).text_bytes == before.text_bytes


def test_a_missing_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"expected readable text at .*found nothing"):
        load(tmp_path / "no-such-file.txt")


def test_a_folder_without_text(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"expected text at .*found no non-empty file"):
        load(tmp_path)
    with pytest.raises(SettingsError, match="found no non-empty file"):
        load(f"{tmp_path}/*.txt")


def test_an_unknown_scheme() -> None:
    with pytest.raises(
        SettingsError, match=r"expected readable text .*found ValueError: Protocol not known"
    ):
        load("gopher9://somewhere/text")


def test_too_little_text_is_an_error_with_the_required_size(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(unique_text(1000))
    with pytest.raises(
        SettingsError, match=r"at least 1,700 bytes .*100 shards.*found 1,000 bytes in 1 files"
    ):
        load(path, shards=100)
    assert load(path, shards=10, shard=9).train.size >= CONTEXT + 1


def test_binary_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "image.bin"
    path.write_bytes(unique_text(5000) + b"\0" * 100 + unique_text(5000))
    with pytest.raises(SettingsError, match=r"expected text, found zero bytes in .*image\.bin"):
        load(path)
