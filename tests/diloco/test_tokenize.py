"""``python -m diloco.tokenize``: text to shards, in parts that can be repeated."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from diloco import tokenize as command
from diloco.data.shard_index import INDEX, read_index
from diloco.data.shard_reader import read_shard
from diloco.protocol.settings import SettingsError
from diloco.store.base import LocalStore
from diloco.tokenize import TokenizeOptions, main, tokenize
from diloco.workloads import tokenizing
from diloco.workloads.tokenizing import Source

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "dogs", "lay", "by", "doors"]


def text_of(number: int, words: int = 40) -> str:
    rng = np.random.default_rng(number)
    return " ".join(rng.choice(WORDS, words))


TEXTS = [text_of(number) for number in range(200)]
OPTIONS = TokenizeOptions(shard_tokens=4096, held_out=0.1)


def all_text(folder: Path, split: str = "train") -> str:
    store = LocalStore(folder)
    index = read_index(store)
    shards = getattr(index, split)
    return b"".join(bytes(read_shard(store, shard, index)) for shard in shards).decode()


def documents_of(folder: Path) -> list[str]:
    store = LocalStore(folder)
    index = read_index(store)
    assert len(index.train) == 1
    [shard] = index.train
    data = store.get(shard.name)
    ends = np.frombuffer(data, "<u4", offset=shard.tokens * index.dtype.itemsize).tolist()
    tokens = read_shard(store, shard, index)
    starts = [0, *ends][: len(ends)]
    return [bytes(tokens[a:b]).decode() for a, b in zip(starts, ends, strict=True)]


def write(folder: Path, kind: str) -> str:
    folder.mkdir(exist_ok=True)
    if kind == "text":
        for number, text in enumerate(TEXTS):
            (folder / f"{number:03d}.txt").write_text(text)
        return str(folder)
    if kind == "jsonl":
        path = folder / "all.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    elif kind == "gz":
        path = folder / "all.jsonl.gz"
        lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        path = folder / "all.parquet"
        parquet.write_table(pa.table({"text": TEXTS, "id": list(range(200))}), path)
    return str(path)


@pytest.mark.parametrize("kind", ["text", "jsonl", "gz", "parquet"])
def test_every_document_is_in_one_split(tmp_path: Path, kind: str) -> None:
    source = write(tmp_path / "in", kind)
    index = tokenize(
        Source(data=source), str(tmp_path / "out"), TokenizeOptions(shard_tokens=1 << 20)
    )
    trained = documents_of(tmp_path / "out")
    held_out = all_text(tmp_path / "out", "held_out")
    assert len(trained) == index.documents
    assert [text for text in TEXTS if text not in held_out] == trained
    assert 0.02 < 1 - len(trained) / len(TEXTS) < 0.12
    assert index.tokens == sum(len(text) for text in trained)


def test_a_large_file_is_divided_at_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "PART_TEXT_BYTES", 1000)
    for kind in ("jsonl", "text"):
        folder = tmp_path / kind
        folder.mkdir()
        lines = (json.dumps({"text": t}) if kind == "jsonl" else t for t in TEXTS)
        path = folder / ("a.jsonl" if kind == "jsonl" else "a.txt")
        path.write_text("".join(f"{line}\n" for line in lines))
        source, out = Source(data=str(path)), folder / "out"
        assert len(tokenizing.find_parts(source)) > 30
        tokenize(source, str(out), TokenizeOptions(shard_tokens=4096, held_out=0.1))
        both = all_text(out) + all_text(out, "held_out")
        assert Counter(both.replace("\n", "")) == Counter("".join(TEXTS))


def test_an_interrupted_command_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "PART_TEXT_BYTES", 4000)
    source = Source(data=write(tmp_path / "in", "jsonl"))
    whole = tokenize(source, str(tmp_path / "whole"), OPTIONS)
    written: list[int] = []

    def write_three(job: Any) -> Any:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(job.number)
        return write_job(job)

    write_job = command._write
    monkeypatch.setattr(command, "_write", write_three)
    with pytest.raises(KeyboardInterrupt):
        tokenize(source, str(tmp_path / "out"), OPTIONS)
    assert not (tmp_path / "out" / INDEX).exists()
    again: list[int] = []
    monkeypatch.setattr(command, "_write", lambda job: again.append(job.number) or write_job(job))
    assert tokenize(source, str(tmp_path / "out"), OPTIONS) == whole
    assert not set(again) & set(written)
    assert not (tmp_path / "out" / "parts").exists()


def test_parts_in_processes_give_the_same_shards(tmp_path: Path) -> None:
    for name in "ab":  # a Parquet file is a part
        path = Path(write(tmp_path / "in", "parquet"))
        path.rename(path.with_name(f"{name}.parquet"))
    source = Source(data=str(tmp_path / "in"))
    options = TokenizeOptions(held_out=0.5)
    one = tokenize(source, str(tmp_path / "one"), options)
    two = tokenize(source, str(tmp_path / "two"), TokenizeOptions(held_out=0.5, workers=2))
    assert len(tokenizing.find_parts(source)) == 2
    assert one == two


def test_another_source_is_refused_at_the_destination(tmp_path: Path) -> None:
    source = Source(data=write(tmp_path / "in", "jsonl"))
    tokenize(source, str(tmp_path / "out"), OPTIONS)
    with pytest.raises(FileExistsError, match="expected no token shards"):
        tokenize(source, str(tmp_path / "out"), OPTIONS)
    (tmp_path / "out" / INDEX).unlink()
    LocalStore(tmp_path / "out").put(command.SPEC, b"{}")
    with pytest.raises(FileExistsError, match="shard size or held-out share"):
        tokenize(source, str(tmp_path / "out"), OPTIONS)


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.01, "hold out, found none in 8,192 tokens .* larger"), (0.9999, "train on, .* smaller")],
)
def test_a_text_too_small_for_its_share_is_refused_with_what_to_enter(
    tmp_path: Path, share: float, expected: str
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("w" * 8192)  # one piece
    with pytest.raises(SettingsError, match=f"{expected} --held-out and another destination"):
        tokenize(Source(data=str(path)), str(tmp_path / "out"), TokenizeOptions(held_out=share))


def test_a_transformers_tokenizer(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    rules = Tokenizer(models.BPE(unk_token="[UNK]"))
    rules.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(special_tokens=["[UNK]", "[END]"], vocab_size=300)
    rules.train_from_iterator(TEXTS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="[END]")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    source = Source(data=write(tmp_path / "in", "jsonl"))
    options = TokenizeOptions(tokenizer=str(tmp_path / "tokenizer"), shard_tokens=1 << 20)
    index = tokenize(source, str(tmp_path / "out"), options)
    assert index.end == tokenizer.eos_token_id
    assert len(index.tokenizer_digest) == 64
    store = LocalStore(tmp_path / "out")
    tokens = read_shard(store, index.train[0], index)
    assert int((tokens == index.end).sum()) == index.documents
    first = tokens[: tokens.tolist().index(index.end)]
    assert tokenizer.decode(first.tolist()) in TEXTS


@pytest.mark.parametrize(
    ("changes", "options", "field"),
    [
        ({"data": "/does/not/exist"}, {}, "data"),
        ({"column": "content"}, {}, "text_column"),
        ({}, {"tokenizer": "/does/not/exist"}, "tokenizer"),
        ({}, {"shard_tokens": 5}, "shard_tokens"),
        ({}, {"held_out": 1.0}, "held_out"),
        ({}, {"workers": 0}, "workers"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    tmp_path: Path, changes: dict[str, str], options: dict[str, Any], field: str
) -> None:
    source = Source(**{"data": write(tmp_path / "in", "jsonl")} | changes)
    with pytest.raises(SettingsError) as caught:
        tokenize(source, str(tmp_path / "out"), TokenizeOptions(**options))
    assert caught.value.field == field


def test_a_bad_line_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n{"text": \n')
    with pytest.raises(SettingsError, match=r"a\.jsonl, line 2 after byte 0"):
        tokenize(Source(data=str(path)), str(tmp_path / "out"), OPTIONS)


def test_the_command_prints_a_summary_or_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write(tmp_path / "in", "jsonl"), str(tmp_path / "out")
    assert main([source, out, "--held-out", "0.1"]) == 0
    assert "documents, and" in capsys.readouterr().out
    assert main([source, out]) == 1
    error = capsys.readouterr().err
    assert "choose another destination" in error
    assert "Traceback" not in error
