"""The samples of replicas: each once an epoch, in a reproducible order, resumable to the sample."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from diloco.data import TokenShards
from diloco.data.order import EpochOrder
from diloco.data.shard_index import BadIndex, read_index
from diloco.data.shard_reader import ShardReader
from diloco.store.base import LocalStore
from tests.diloco.data.shards import write_shards

CONTEXT = 5
SAMPLES = 4 * 7
"""Of four shards with 40 tokens: (40 - 1) // 5 each."""


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path)
    write_shards(store)
    return store


def shards(store: LocalStore, **options: Any) -> TokenShards:
    return TokenShards(store.uri, context=CONTEXT, store=store, **options)


def firsts(dataset: TokenShards, count: int) -> list[int]:
    """Return the first token of the next samples, which identifies them."""
    return [int(sample[0]) for sample in itertools.islice(dataset, count)]


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_replicas_divide_an_epoch(store: LocalStore, replicas: int) -> None:
    seen: Counter[int] = Counter()
    for replica in range(replicas):
        dataset = shards(store, replica=replica, replicas=replicas)
        count = SAMPLES * (replica + 1) // replicas - SAMPLES * replica // replicas
        seen.update(firsts(dataset, count))
        assert dataset.epoch == 1
    starts = {40 * shard + CONTEXT * n for shard in range(4) for n in range(7)}
    assert seen == Counter(starts)


def test_a_sample_is_a_window_of_its_shard(store: LocalStore) -> None:
    for sample in itertools.islice(shards(store), SAMPLES):
        assert sample.dtype == torch.int64
        assert sample.tolist() == list(range(int(sample[0]), int(sample[0]) + CONTEXT + 1))


def test_an_order_depends_on_seed_and_epoch_only(store: LocalStore) -> None:
    two_epochs = firsts(shards(store, seed=1), 2 * SAMPLES)
    assert two_epochs == firsts(shards(store, seed=1), 2 * SAMPLES)
    first, second = two_epochs[:SAMPLES], two_epochs[SAMPLES:]
    assert sorted(first) == sorted(second)
    assert first != second
    assert first != firsts(shards(store, seed=2), SAMPLES)
    assert first != sorted(first)


def test_the_order_is_the_same_on_every_machine() -> None:
    order = EpochOrder(np.array([3, 2, 4]), seed=7, epoch=1, mix=2)
    assert [tuple(order.at(n)) for n in range(9)] == GOLDEN


GOLDEN = [(2, 3), (2, 2), (2, 1), (1, 1), (2, 0), (1, 0), (0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("taken", [0, 1, 13, SAMPLES, 40])
def test_a_state_continues_at_the_next_sample(store: LocalStore, taken: int) -> None:
    dataset = shards(store, replica=1, replicas=2)
    firsts(dataset, taken)
    state = dataset.state_dict()
    expected = firsts(dataset, 20)
    resumed = shards(store)
    resumed.load_state_dict(state)
    assert firsts(resumed, 20) == expected


def test_ranks_divide_the_samples_of_their_replica_and_can_change(store: LocalStore) -> None:
    alone = firsts(shards(store), 12)
    pair = [shards(store, rank=rank, ranks=2) for rank in range(2)]
    both = [firsts(dataset, 3) for dataset in pair]
    assert both == [alone[0:6:2], alone[1:6:2]]
    four = [shards(store, rank=rank, ranks=4) for rank in range(4)]
    for dataset in four:
        dataset.load_state_dict(pair[0].state_dict())
    rows = [firsts(dataset, 1) for dataset in four]
    assert list(itertools.chain(*rows)) == alone[6:10]


def test_another_number_of_replicas_continues_with_the_next_epoch(store: LocalStore) -> None:
    dataset = shards(store, replica=0, replicas=2)
    firsts(dataset, 3)
    resumed = shards(store)
    resumed.load_state_dict(dataset.state_dict())
    resumed.assign(0, 2)
    assert firsts(resumed, 1) == firsts(dataset, 1)
    resumed.assign(2, 4)
    assert resumed.epoch == 1
    quarter = shards(store, replica=2, replicas=4)
    firsts(quarter, 7)
    assert firsts(resumed, 7) == firsts(quarter, 7)


@pytest.mark.parametrize("name", ["shards", "context", "seed"])
def test_the_state_of_other_data_is_refused(store: LocalStore, name: str) -> None:
    dataset = shards(store)
    with pytest.raises(ValueError, match=name):
        dataset.load_state_dict(dataset.state_dict() | {name: "other"})


def test_a_data_loader_batches_samples(store: LocalStore) -> None:
    batch = next(iter(DataLoader(shards(store), batch_size=4)))
    assert batch.shape == (4, CONTEXT + 1)
    assert batch[:, 0].tolist() == firsts(shards(store), 4)


def test_a_copy_for_a_worker_reads_the_same_samples(store: LocalStore) -> None:
    dataset = shards(store)
    firsts(dataset, 3)
    assert firsts(pickle.loads(pickle.dumps(dataset)), 5) == firsts(dataset, 5)


def damage(store: LocalStore, name: str) -> None:
    data = bytearray(store.get(name))
    data[0] ^= 1
    store.put(name, bytes(data))


def test_a_damaged_shard_is_refused_or_skipped(store: LocalStore) -> None:
    damage(store, "train/00000-002.tokens")
    with pytest.raises(BadIndex, match=r"train/00000-002\.tokens"):
        firsts(shards(store), SAMPLES)
    dataset = shards(store, damaged="skip")
    seen = firsts(dataset, SAMPLES - 7)
    assert dataset.skipped == ("train/00000-002.tokens",)
    assert sorted(seen) == [40 * shard + CONTEXT * n for shard in (0, 1, 3) for n in range(7)]


def test_many_damaged_shards_are_refused(store: LocalStore) -> None:
    damage(store, "train/00000-001.tokens")
    damage(store, "train/00000-002.tokens")
    with pytest.raises(BadIndex, match="expected at most 1 damaged shards of 4"):
        firsts(shards(store, damaged="skip"), SAMPLES)


def test_a_reader_holds_a_bounded_number_of_shards(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write_shards(store, shards=30)
    index = read_index(store)
    reader = ShardReader(store, index, held=3)
    for number in range(30):
        reader.read_ahead([number, (number + 1) % 30, (number + 2) % 30, (number + 3) % 30])
        assert len(reader._shards) <= 3


def test_each_shard_is_read_once_an_epoch(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write_shards(store, shards=12)
    counted = CountingStore(tmp_path)
    dataset = TokenShards(store.uri, context=CONTEXT, store=counted, mix=3)
    firsts(dataset, 12 * 7)
    assert {name: n for name, n in counted.gets.items() if n != 1} == {}
    assert len(counted.gets) == 13


class CountingStore(LocalStore):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gets: Counter[str] = Counter()

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        self.gets[key] += 1
        return super().get(key, limit=limit)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replica": 2, "replicas": 2}, "expected a replica from 0 to 1, found 2"),
        ({"replicas": 29}, "expected at least 29 samples of 6 tokens"),
        ({"rank": 1, "ranks": 1}, "expected a rank from 0 to 0, found 1"),
        ({"mix": 0}, "expected context and mix of 1 or more"),
        ({"damaged": "ignore"}, "damaged: expected one of refuse, skip, found 'ignore'"),
    ],
)
def test_wrong_arguments_are_refused(
    store: LocalStore, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        shards(store, **options)
