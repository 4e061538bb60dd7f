"""The index of token shards, which any writer of the bucket can replace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco.data.shard_check import ShardNeeds, open_index, read_shards
from diloco.data.shard_index import (
    INDEX,
    BadIndex,
    ShardIndex,
    dtype_of,
    read_index,
    tokens_of,
)
from diloco.data.shard_reader import held_out_windows, read_shard
from diloco.protocol.settings import SettingsError
from diloco.store.base import LocalStore
from tests.diloco.data.shards import write_shards


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path)
    write_shards(store)
    return store


def test_an_index_is_read_as_it_was_written(store: LocalStore) -> None:
    index = read_index(store)
    assert (index.tokens, index.documents, len(index.train)) == (160, 8, 4)
    assert ShardIndex.from_bytes(index.to_bytes()) == index
    tokens = np.concatenate([read_shard(store, shard, index) for shard in index.train])
    assert tokens.tolist() == list(range(160))
    first = index.train[0]
    ends = store.get(first.name)[first.tokens * index.dtype.itemsize :]
    assert np.frombuffer(ends, "<u4").tolist() == [20, 40]


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32")],
)
def test_tokens_have_the_smallest_dtype(vocabulary: int, dtype: str) -> None:
    assert dtype_of(vocabulary).name == dtype


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "other"}, "written by python -m diloco.tokenize"),
        ({"v": 2}, "expected version 1, found 2"),
        ({"vocabulary": 0}, "vocabulary: expected 1 to"),
        ({"vocabulary": True}, "vocabulary: expected 1 to"),
        ({"dtype": "uint64"}, "dtype: expected uint16 for 60000 tokens, found 'uint64'"),
        ({"end": 60_000}, "end: expected 0 to 59999"),
        ({"tokenizer": ["bytes"]}, "tokenizer: expected a short text"),
        ({"train": 3}, "train: expected columns"),
        ({"train": {"name": []}}, "expected four lists"),
        ({"train": {"name": ["a"], "tokens": [], "documents": [], "checksum": []}}, "one length"),
    ],
)
def test_a_changed_index_is_refused_by_name(
    store: LocalStore, change: dict[str, Any], message: str
) -> None:
    body = json.loads(store.get(INDEX)) | change
    store.put(INDEX, json.dumps(body).encode())
    with pytest.raises(BadIndex, match=message):
        read_index(store)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("name", "../../secret", "expected a name such as train/00000-000.tokens"),
        ("name", "held_out/00000-000.tokens", "expected a name such as train"),
        ("name", "train/00000-001.tokens", "found a name twice"),
        ("tokens", 2**40, "expected at most"),
        ("tokens", -1, "tokens: expected 1 or more, found -1"),
        ("documents", 0.5, "documents: expected 0 or more"),
        ("checksum", "abc", "expected a checksum of 32 hex digits"),
    ],
)
def test_a_changed_row_is_refused_by_name(
    store: LocalStore, column: str, value: Any, message: str
) -> None:
    body = json.loads(store.get(INDEX))
    body["train"][column][0] = value
    store.put(INDEX, json.dumps(body).encode())
    with pytest.raises(BadIndex, match=message):
        read_index(store)


def test_an_index_of_empty_lists_is_refused_before_it_takes_memory(store: LocalStore) -> None:
    store.put(INDEX, b'{"kind": [' + b"[]," * 20_000 + b"[]]}")
    with pytest.raises(BadIndex, match="expected at most 10000 objects and lists, found 20003"):
        read_index(store)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_an_index_without_shards_is_refused_by_name(store: LocalStore, split: str) -> None:
    body = json.loads(store.get(INDEX))
    body[split] = {name: [] for name in body[split]}
    store.put(INDEX, json.dumps(body).encode())
    with pytest.raises(SettingsError, match="expected a shard for training and one held out"):
        read_shards(store)


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 5000, b"\xff", b"null"])
def test_an_index_that_is_no_object_is_refused(store: LocalStore, data: bytes) -> None:
    store.put(INDEX, data)
    with pytest.raises(BadIndex):
        read_index(store)


def test_a_damaged_shard_is_refused_by_name(store: LocalStore) -> None:
    index = read_index(store)
    shard = index.train[1]
    data = bytearray(store.get(shard.name))
    data[3] ^= 1
    store.put(shard.name, bytes(data))
    with pytest.raises(BadIndex, match=r"shard train/00000-001\.tokens: expected checksum"):
        read_shard(store, shard, index)
    store.put(shard.name, bytes(data) * 2)
    with pytest.raises(BadIndex, match=r"shard train/00000-001\.tokens .*expected an object of 88"):
        read_shard(store, shard, index)
    store.delete([shard.name])
    with pytest.raises(BadIndex, match="found none"):
        read_shard(store, shard, index)


def test_tokens_outside_the_vocabulary_are_refused(store: LocalStore) -> None:
    index = read_index(store)
    small = ShardIndex(**{**index.__dict__, "vocabulary": 300})
    shard = index.train[-1]
    assert int(tokens_of(shard, store.get(shard.name), small).max()) == 159
    other = ShardIndex(**{**index.__dict__, "vocabulary": 258})
    assert tokens_of(shard, store.get(shard.name), other).max() < 258
    large = write_shards(store, tokens=200)
    narrow = ShardIndex(**{**large.__dict__, "vocabulary": 500})
    with pytest.raises(BadIndex, match="expected tokens below 500, found 799"):
        read_shard(store, large.train[-1], narrow)


NEEDS = ShardNeeds(context=10, parts=2, batch_size=3, vocabulary=60_000, digest="bytes")


def needs(**changes: Any) -> ShardNeeds:
    return ShardNeeds(**{**NEEDS.__dict__, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary": 256}, "expected tokens for a model of 256, found 60,000"),
        ({"digest": "f" * 64}, "expected shards of the workload's tokenizer"),
        ({"parts": 5}, "expected at least 15 samples of 11 tokens, a batch for each of 5 parts, "),
        ({"context": 40, "parts": 0}, "expected a held-out shard of 41 tokens, found 40"),
    ],
)
def test_shards_that_do_not_fit_a_workload_are_refused(
    store: LocalStore, changes: dict[str, Any], message: str
) -> None:
    assert open_index(store, NEEDS).tokens == 160
    with pytest.raises(SettingsError, match=message) as caught:
        open_index(store, needs(**changes))
    assert caught.value.field == "data"


def test_shards_that_are_not_there_are_refused(store: LocalStore) -> None:
    store.delete(["train/00000-000.tokens"])
    with pytest.raises(SettingsError, match=r"expected the shard train/00000-000\.tokens"):
        open_index(store, NEEDS)
    store.delete([INDEX])
    with pytest.raises(SettingsError, match=r"expected index\.json at file://.*, found none"):
        open_index(store, NEEDS)


def test_held_out_windows_are_whole_windows_of_held_out_text(store: LocalStore) -> None:
    windows = held_out_windows(store, read_index(store), context=8, tokens=24)
    assert windows.tolist() == [list(range(n, n + 9)) for n in (0, 8, 16)]
