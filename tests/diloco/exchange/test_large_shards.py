"""An owner of two shards stores the first one, and the others read it, while it sums the second."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from bench.support.cuts import small_cuts
from diloco.clock import SystemClock
from diloco.codecs import get_codec
from diloco.exchange import reduce
from diloco.exchange.payload import PayloadInfo, PayloadWriter
from diloco.exchange.reduce import CannotReduce, Reduction
from diloco.exchange.timings import Timings
from diloco.model.fragments import Slot
from diloco.model.outer_optimizer import ContentDigest
from diloco.protocol import keys
from diloco.protocol.records import Commit, Identity, Plan
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore, MakeParts, StoreUnavailable
from diloco.store.daemon import DaemonPool
from tests.diloco.clocks import ManualClock
from tests.diloco.exchange.planned import planned

INCARNATION = "00001-00000000"
NUMEL = 8 * 4096
SLOTS = (Slot(name="a", shape=(NUMEL,), dtype="float32", numel=NUMEL),)
IDENTITIES = [Identity(replica=replica, incarnation=INCARNATION) for replica in range(2)]


class Counted(LocalStore):
    """Counts the reads of each object; an upload can wait for ``may_store``."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: Counter[str] = Counter()
        self.may_store: dict[str, threading.Event] = {}

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.reads[key.split("/", 2)[-1].split(".")[0]] += 1
        return super().get_range(key, start, length)

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        for name, event in self.may_store.items():
            assert name not in key or event.wait(60)
        super().put_stream(key, make_parts, size_bytes=size_bytes)


@pytest.fixture(autouse=True)
def cuts() -> Iterator[None]:
    with small_cuts(part_bytes=16_384):
        yield


@pytest.fixture
def store(tmp_path: Path) -> Counted:
    return Counted(tmp_path)


@pytest.fixture
def plan(store: Counted) -> Plan:
    """A round of two contributors that own two shards each."""
    contributions = []
    for identity in IDENTITIES:
        info = PayloadInfo(round=1, fragment=0, codec="fp32", numel=NUMEL, **vars(identity))
        vector = torch.randn(NUMEL, generator=torch.Generator().manual_seed(identity.replica))
        packing = PayloadWriter(info, vector, get_codec("fp32"), SLOTS, clock=SystemClock())
        key = keys.contribution_payload(1, identity.replica, INCARNATION)
        LocalStore.put_stream(store, key, packing.parts)
        contributions.append(
            planned(identity, size_bytes=packing.size_bytes, digest=packing.digest)
        )
    return Plan(
        round=1,
        fragment=0,
        mode="sharded",
        planner=IDENTITIES[0],
        contributions=tuple(contributions),
        owners=(0, 1, 0, 1),
        wall_s=0.0,
    )


def reduction(store: Counted, plan: Plan) -> Reduction:
    return Reduction(store, GroupSettings(), plan, SLOTS, timings=Timings(SystemClock()))


def committed(*digests: str) -> Commit:
    return Commit(
        round=1,
        fragment=0,
        committer=IDENTITIES[0],
        contributors=tuple(IDENTITIES),
        shards=digests,
        void="",
        tokens_total=1,
        committed_total=1,
        wall_s=0.0,
    )


def listing(store: Counted) -> dict[int, tuple[str, ...]]:
    names = [keys.parse_reduced_shard(info.key) for info in store.list(keys.reduced(1))]
    return {shard: (digest,) for _, shard, digest in filter(None, names)}


def test_the_first_shard_is_stored_before_the_second(store: Counted, plan: Plan) -> None:
    stored: list[list[int]] = []
    may_store = store.may_store["reduced/00002."] = threading.Event()

    def listed() -> dict[int, tuple[str, ...]]:
        stored.append([*listing(store)])
        may_store.set()
        return {}

    digests = reduction(store, plan).store_shards([0, 2], listed=listed)
    assert stored[0] == [0] and stored[-1] == [0, 2]
    assert list(digests) == [0, 2]
    alone = {n: reduction(store, plan).store_shards([n])[n] for n in (0, 2)}
    assert digests == alone


@pytest.mark.usefixtures("waits")
def test_listed_shards_are_read_once_before_the_commit(
    store: Counted, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second listing has all shards. Own ones are not read. The last one is stored once the
    first listed shard has been read."""
    digests = reduction(store, plan).store_shards([1, 3])
    own = reduction(store, plan)
    may_store = store.may_store["reduced/00002."] = threading.Event()
    get_range = store.get_range

    def read(key: str, start: int, length: int) -> bytes:
        content = get_range(key, start, length)
        if store.reads["reduced/00001"] == 2:
            may_store.set()
        return content

    monkeypatch.setattr(store, "get_range", read)
    listings = iter(({1: (digests[1],), 9: ("a",)}, None))
    digests |= own.store_shards([0, 2], listed=lambda: next(listings) or listing(store))
    assert store.reads["reduced/00001"] == 2
    commit = committed(*(digests[shard] for shard in range(4)))
    merged = own.committed(commit)
    found = [store.reads[f"reduced/0000{shard}"] for shard in range(4)]
    assert found == [0, 2, 0, 2]
    assert torch.equal(merged.vector, reduction(store, plan).committed(commit).vector)


@pytest.mark.parametrize(
    ("listings", "first_read", "found"),
    [
        ([[], [1, 2]], 2, {1, 2}),
        ([[1, 2]], 1, {1, 2}),
        ([[1], [1, 2]], 2, {1, 2}),
        ([[1], [1], [1, 2]], 2, {1, 2}),
        ([[], [1], [1], [1, 2, 4]], 2, {1, 2, 4}),
    ],
    ids=["later", "at once", "one later", "one much later", "with a second one"],
)
def test_shards_of_each_other_owner_are_read_while_the_last_own_one_is_stored(
    store: Counted,
    plan: Plan,
    monkeypatch: pytest.MonkeyPatch,
    listings: list[list[int]],
    first_read: int,
    found: set[int],
) -> None:
    """The first listing that lacks some is repeated once before those that are there are read."""
    monkeypatch.setattr(reduce, "FIRST_PAUSE_S", 1e-6)
    plan = replace(plan, owners=(0, 1, 2, 0, 1, 2))
    digests = reduction(store, plan).store_shards([1, 2, 4, 5])
    own = reduction(store, plan)
    may_store = store.may_store["reduced/00003."] = threading.Event()
    reads, begun, listed_so_far = Counter[tuple[int, int]](), [], 0
    get_range, in_pool = store.get_range, reduce._in_pool

    def read(key: str, start: int, length: int) -> bytes:
        content = get_range(key, start, length)
        if (parsed := keys.parse_reduced_shard(key)) and not may_store.is_set():
            reads[parsed[1], start] += 1
            if {shard for shard, _ in reads} == found:
                may_store.set()
        return content

    def listed() -> dict[int, tuple[str, ...]]:
        nonlocal listed_so_far
        listed_so_far += 1
        shards = listings[min(listed_so_far, len(listings)) - 1]
        return {shard: (digests[shard],) for shard in shards}

    def noted(pool: DaemonPool, function: partial[None]) -> Future[None]:
        if function.func == own._read_early:
            begun.append(listed_so_far)
        return in_pool(pool, function)

    monkeypatch.setattr(store, "get_range", read)
    monkeypatch.setattr(reduce, "_in_pool", noted)
    digests |= own.store_shards([0, 3], listed=listed)
    assert begun[0] == first_read
    assert set(reads.values()) == {1}
    merged = own.committed(committed(*(digests[shard] for shard in range(6))))
    assert torch.equal(merged.vector, reduction(store, plan).gather().vector)


@pytest.fixture
def waits(store: Counted, monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The pauses between listings, while the second shard is stored; it is stored after eight."""
    found: list[float | None] = []
    may_store = store.may_store["reduced/00002."] = threading.Event()

    def waited(futures: list[Future[None]], timeout: float | None = None) -> None:
        found.append(timeout)
        if timeout is None or len(found) == 8:
            may_store.set()
            wait(futures)

    monkeypatch.setattr(reduce, "wait", waited)
    return found


@pytest.fixture
def reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Early reads end before the next listing."""

    def in_pool(pool: DaemonPool, function: partial[None]) -> Future[None]:
        called = pool.submit(function)
        if function.func.__name__ == "_read_early":
            wait([called])
        return called

    monkeypatch.setattr(reduce, "_in_pool", in_pool)


def test_shards_are_listed_while_others_are_still_read(
    store: Counted, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The early read of shard 1 ends only after that of shard 3 has begun, which is stored last."""
    digests = reduction(store, plan).store_shards([1, 3])
    own = reduction(store, plan)
    may_store = store.may_store["reduced/00002."] = threading.Event()
    has_begun, listings, pauses = threading.Event(), [], []
    get_range = store.get_range

    def read(key: str, start: int, length: int) -> bytes:
        shard = (keys.parse_reduced_shard(key) or (0, None))[1]
        if shard == 1:
            may_store.set()
            assert has_begun.wait(60), "shard 3 was not read"
        elif shard == 3:
            has_begun.set()
        return get_range(key, start, length)

    def listed() -> dict[int, tuple[str, ...]]:
        listings.append(may_store.is_set())
        return listing(store) if sum(listings) >= 5 else {1: (digests[1],)}

    def waited(futures: list[Future[None]], timeout: float | None = None) -> None:
        pauses.append(timeout)
        wait(futures, 0.001 if may_store.is_set() and timeout else None)

    monkeypatch.setattr(store, "get_range", read)
    monkeypatch.setattr(reduce, "wait", waited)
    digests |= own.store_shards([0, 2], listed=listed)
    assert pauses == [None, *(reduce.FIRST_PAUSE_S * 2**n for n in range(len(pauses) - 1))]
    merged = own.committed(committed(*(digests[shard] for shard in range(4))))
    assert torch.equal(merged.vector, reduction(store, plan).gather().vector)


def test_pauses_between_listings_double(
    store: Counted, plan: Plan, waits: list[float | None]
) -> None:
    listings: list[None] = []

    def listed() -> dict[int, tuple[str, ...]]:
        listings.append(None)
        return {}

    reduction(store, plan).store_shards([0, 2], listed=listed)
    assert waits == [reduce.FIRST_PAUSE_S * 2**n for n in range(8)]
    assert len(listings) == len(waits) + 1


def test_a_damaged_shard_is_read_once_before_the_commit(
    store: Counted, plan: Plan, waits: list[float | None]
) -> None:
    digest = "0" * 64
    store.put(keys.reduced_shard(1, 1, digest), bytes(NUMEL))
    reduction(store, plan).store_shards([0, 2], listed=lambda: {1: (digest,)})
    assert store.reads["reduced/00001"] == 2
    assert waits[0] is None, "the only other owner has a shard"


@pytest.mark.usefixtures("reads_at_once")
def test_a_damaged_shard_is_not_read_again_while_another_one_is_missing(
    store: Counted, plan: Plan, waits: list[float | None]
) -> None:
    plan, digest = replace(plan, owners=(0, 1, 0, 2)), "0" * 64
    store.put(keys.reduced_shard(1, 1, digest), bytes(NUMEL))
    reduction(store, plan).store_shards([0, 2], listed=lambda: {1: (digest,)})
    assert len(waits) >= 8 and store.reads["reduced/00001"] == 2


def test_nothing_is_listed_after_an_upload_has_failed(
    store: Counted, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_fail, put_stream, listings = threading.Event(), store.put_stream, []

    def fails(key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        if "reduced/00002." in key:
            assert may_fail.wait(60)
            raise StoreUnavailable("SlowDown")
        put_stream(key, make_parts, size_bytes=size_bytes)

    def listed() -> dict[int, tuple[str, ...]]:
        listings.append(None)
        may_fail.set()
        return {}

    monkeypatch.setattr(store, "put_stream", fails)
    monkeypatch.setattr(reduce, "wait", lambda futures, timeout: wait(futures))
    with pytest.raises(StoreUnavailable):
        reduction(store, plan).store_shards([0, 2], listed=listed)
    assert len(listings) == 1


def test_a_shard_with_several_versions_is_not_read_before_the_commit(
    store: Counted, plan: Plan, waits: list[float | None]
) -> None:
    digests = reduction(store, plan).store_shards([1])
    versions = (digests[1], "0" * 64)
    reduction(store, plan).store_shards([0, 2], listed=lambda: {1: versions})
    assert store.reads["reduced/00001"] == 0
    assert len(waits) == 8


def test_an_error_of_a_read_is_raised_and_no_thread_is_left(
    store: Counted, plan: Plan, waits: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = reduction(store, plan).store_shards([1])
    get_range = store.get_range

    def fails(key: str, start: int, length: int) -> bytes:
        if keys.parse_reduced_shard(key):
            raise StoreUnavailable("SlowDown")
        return get_range(key, start, length)

    monkeypatch.setattr(store, "get_range", fails)
    with pytest.raises(StoreUnavailable):
        reduction(store, plan).store_shards([0, 2], listed=lambda: {1: (digests[1],)})
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"store_shard", "read_shards"}


@pytest.mark.usefixtures("reads_at_once")
def test_the_upload_is_measured_beside_a_read(
    store: Counted, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = reduction(store, plan).store_shards([1])
    clock, may_store = ManualClock(), threading.Event()
    store.may_store["reduced/00002."] = may_store

    def waited(futures: list[Future[None]], timeout: float | None = None) -> None:
        clock.sleep(2.0)
        may_store.set()
        wait(futures)

    monkeypatch.setattr(reduce, "wait", waited)
    timings = Timings(clock)
    own = Reduction(store, GroupSettings(), plan, SLOTS, timings=timings)
    own.store_shards([0, 2], listed=lambda: {1: (digests[1],)})
    assert sum(timings.seconds.values()) == clock.now_s == timings.seconds["upload"] == 2.0


def test_early_versions_that_the_commit_does_not_name_are_replaced(
    store: Counted, plan: Plan
) -> None:
    digests = reduction(store, plan).store_shards([1, 3])
    hostile, missing = "0" * 64, "f" * 64
    wrong = torch.ones(NUMEL // 4).numpy().tobytes()
    store.put(keys.reduced_shard(1, 1, hostile), wrong)
    for early in ((hostile,), (missing,), (hostile, digests[1])):
        own = reduction(store, plan)
        digests |= own.store_shards([0, 2], listed=lambda early=early: {1: early})
        commit = committed(*(digests[shard] for shard in range(4)))
        expected = reduction(store, plan).committed(commit)
        assert torch.equal(own.committed(commit).vector, expected.vector)


def test_an_unreadable_payload_ends_the_reduction_of_all_own_shards(
    store: Counted, plan: Plan
) -> None:
    store.delete([keys.contribution_payload(1, 1, INCARNATION)])
    with pytest.raises(CannotReduce, match="replica 1"):
        reduction(store, plan).store_shards([0, 2])


DIGEST = "0" * 64


@pytest.mark.parametrize(
    "digests",
    [(), (DIGEST,) * 3, (DIGEST,) * 5, ("../x", *(DIGEST,) * 3), (DIGEST.upper() + "a",) * 4],
)
def test_a_commit_that_does_not_name_every_shard_is_not_applied(
    store: Counted, plan: Plan, digests: tuple[str, ...]
) -> None:
    with pytest.raises(CannotReduce, match="expected the digests of 4 shards in the commit"):
        reduction(store, plan).committed(committed(*digests))


def test_an_empty_object_is_no_shard(store: Counted, plan: Plan) -> None:
    """It has the digest of no bytes, and would leave the memory of the mean as it was."""
    digests = reduction(store, plan).store_shards(range(4))
    nothing = ContentDigest().hexdigest()
    store.put(keys.reduced_shard(1, 2, nothing), b"")
    named = committed(*({**digests, 2: nothing}[shard] for shard in range(4)))
    with pytest.raises(CannotReduce, match=f"expected digest {nothing} of shard 2"):
        reduction(store, plan).committed(named)
