"""Records read by one thread while another thread drops them from the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from diloco.clock import Clock, SystemClock
from diloco.exchange.round_observer import Base, RoundObserver
from diloco.membership.lease import Lease
from diloco.membership.observer import Observer
from diloco.model.fragments import Slot, Table
from diloco.protocol import keys
from diloco.protocol.records import (
    BadRecord,
    Commit,
    ContributionRecord,
    Heartbeat,
    Identity,
    Plan,
)
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore, MissingKey
from tests.diloco.clocks import ManualClock
from tests.diloco.exchange.planned import planned

ME = Identity(replica=0, incarnation="00001-00000000")


class HookedStore:
    """A store with a hook before each get, in place of a concurrent thread."""

    atomic_create = True

    def __init__(self, inner: LocalStore) -> None:
        self.inner = inner
        self.hook: Callable[[str], object] = lambda key: None

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        self.hook(key)
        return self.inner.get(key, limit=limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def record(replica: int) -> ContributionRecord:
    return ContributionRecord(
        round=1,
        fragment=0,
        base_round=0,
        base_digest="",
        replica=replica,
        incarnation="00001-00000000",
        model_hash="",
        codec="fp32",
        numel=1,
        tokens=1,
        new_tokens=1,
        steps=1,
        rounds=1,
        loss=0.0,
        norm=0.0,
        norms=(0.0,),
        size_bytes=260,
        digest="",
        compute_s=0.0,
        encode_s=0.0,
        wall_s=0.0,
    )


def make(
    tmp_path: Path, *, clock: Clock | None = None, **chosen: Any
) -> tuple[HookedStore, RoundObserver]:
    clock = clock or SystemClock()
    store = HookedStore(LocalStore(tmp_path))
    settings = GroupSettings(**chosen)
    round_observer = RoundObserver(
        store,  # type: ignore[arg-type]
        settings,
        lease=Lease(
            store,  # type: ignore[arg-type]
            ME,
            clock=clock,
            interval_s=1.0,
            heartbeat_timeout_s=15.0,
            device="cpu",
        ),
        observer=Observer(store, clock=clock, timeout_s=15.0),  # type: ignore[arg-type]
        model_hash="",
        table=Table(
            [Slot(name="w", shape=(1,), dtype="float32", numel=1)], fragments=1, pattern="strided"
        ),
    )
    return store, round_observer


def a_commit(round: int) -> Commit:
    return Commit(
        round=round,
        fragment=0,
        committer=ME,
        contributors=(ME,),
        void="",
        tokens_total=0,
        committed_total=round,
        wall_s=0.0,
    )


def seen(round_observer: RoundObserver) -> list[int]:
    view = round_observer.before_plan(1, Base(round=0, digest=""), waited_s=0.0, sync_s=0.0)
    return sorted(view.contributions)


def test_records_dropped_during_a_listing_are_still_returned(tmp_path: Path) -> None:
    store, round_observer = make(tmp_path)
    for replica in range(3):
        key = keys.contribution_record(1, replica, "00001-00000000")
        store.put(key, record(replica).to_bytes())
    store.hook = lambda key: round_observer.forget_before(5)
    assert seen(round_observer) == [0, 1, 2]


def test_a_commit_dropped_while_it_is_read_is_still_returned(tmp_path: Path) -> None:
    store, round_observer = make(tmp_path)
    commit = a_commit(1)
    store.put(keys.commit(1), commit.to_bytes())

    class Forgetful(dict[int, Commit]):
        def __setitem__(self, round: int, value: Commit) -> None:
            """Another thread has already replaced the dict."""

    round_observer._commits = Forgetful()
    assert round_observer.commit_of(1) == commit


def test_a_record_listed_before_it_is_readable_is_read_later(tmp_path: Path) -> None:
    store, round_observer = make(tmp_path)
    key = keys.contribution_record(1, 2, "00001-00000000")
    store.put(key, record(2).to_bytes())

    def not_yet(wanted: str) -> None:
        if wanted == key:
            raise MissingKey(wanted)

    store.hook = not_yet
    assert seen(round_observer) == []
    store.hook = lambda key: None
    assert seen(round_observer) == [2]


def test_a_repaired_record_is_read_after_many_refusals(tmp_path: Path) -> None:
    """Two replicas that refused each other's first upload forever would never plan a round."""
    store, round_observer = make(tmp_path)
    key = keys.contribution_record(1, 2, "00001-00000000")
    good = record(2).to_bytes()
    store.put(key, good[:-1])
    reads: list[str] = []
    store.hook = reads.append
    assert [seen(round_observer) for _ in range(30)] == [[]] * 30
    assert reads.count(key) <= 6, "most lists do not read it again"
    store.put(key, good)
    assert [2] in [seen(round_observer) for _ in range(10)]


def plan(round: int, *weights: float) -> Plan:
    contributions = tuple(
        planned(Identity(replica=replica, incarnation="00001-00000000"), weight=weight)
        for replica, weight in enumerate(weights or (1.0,))
    )
    return Plan(
        round=round,
        fragment=0,
        mode="gather",
        planner=ME,
        contributions=contributions,
        wall_s=0.0,
    )


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), 0.0, -0.5, 1.5])
def test_a_plan_with_impossible_weights_is_refused(tmp_path: Path, weight: float) -> None:
    """NaN would reach the weights of every replica; weights without a sum divide by zero."""
    store, round_observer = make(tmp_path)
    store.put(keys.plan(1), plan(1, 0.5, weight).to_bytes())
    with pytest.raises(BadRecord, match=f"with weights above 0, up to 1, found {weight}"):
        round_observer.plan_of(1)


def test_a_plan_without_contributions_is_refused(tmp_path: Path) -> None:
    store, round_observer = make(tmp_path)
    store.put(keys.plan(1), dataclasses.replace(plan(1), contributions=()).to_bytes())
    with pytest.raises(BadRecord, match="found no contribution"):
        round_observer.plan_of(1)


def previous(round_observer: RoundObserver, round: int) -> Plan | None:
    view = round_observer.before_plan(round, Base(round=0, digest=""), waited_s=0.0, sync_s=0.0)
    return view.previous


def test_the_previous_plan_is_read_once(tmp_path: Path) -> None:
    store, round_observer = make(tmp_path)
    store.put(keys.plan(3), plan(3).to_bytes())
    reads: list[str] = []
    store.hook = reads.append
    assert previous(round_observer, 4) == previous(round_observer, 4) == plan(3)
    assert reads.count(keys.plan(3)) == 1
    round_observer.remember_plan(plan(4))
    assert previous(round_observer, 5) == plan(4)
    assert keys.plan(4) not in reads, "this process has created it"


def test_an_unreadable_or_missing_previous_plan_is_unknown(tmp_path: Path) -> None:
    store, round_observer = make(tmp_path)
    store.put(keys.plan(3), b"{")
    assert previous(round_observer, 4) is None
    assert previous(round_observer, 6) is None
    round_observer.remember_plan(plan(2))
    assert previous(round_observer, 4) == plan(2), "the newest that is known"


def beat_all(
    store: HookedStore,
    replicas: range,
    *,
    round: int = 1,
    count: int = 1,
    state: Literal["computing", "left"] = "computing",
) -> None:
    for replica in replicas:
        lease = Heartbeat(
            replica=replica,
            incarnation="00001-00000000",
            count=count,
            interval_s=15.0,
            state=state,
            round=round,
            step=0,
            tokens=0,
            started_wall_s=0.0,
            wall_s=0.0,
        )
        store.put(keys.beat(replica, lease.incarnation), lease.to_bytes())


def leases_read(store: HookedStore, action: Callable[[], object]) -> set[int]:
    found: set[int] = set()
    store.hook = lambda key: found.update([p[0]] if (p := keys.parse_beat(key)) else [])
    action()
    return found


def test_the_first_listing_of_a_large_group_reads_no_lease_of_a_contributor(
    tmp_path: Path,
) -> None:
    store, round_observer = make(tmp_path, num_replicas=16)
    beat_all(store, range(1, 16))
    for replica in range(14):
        key = keys.contribution_record(1, replica, "00001-00000000")
        store.put(key, record(replica).to_bytes())
    assert leases_read(store, lambda: seen(round_observer)) == {14, 15}


def contribute_all(store: HookedStore, replicas: range) -> None:
    for replica in replicas:
        key = keys.contribution_record(1, replica, "00001-00000000")
        store.put(key, record(replica).to_bytes())


@pytest.mark.parametrize("seen_before", ["a moment ago", "long ago", "never"])
def test_a_contribution_that_a_replica_makes_before_it_leaves_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen_before: str
) -> None:
    clock = ManualClock()
    store, round_observer = make(tmp_path, clock=clock, num_replicas=2)
    beat_all(store, range(1, 2))
    if seen_before != "never":
        assert seen(round_observer) == []
    clock.sleep({"a moment ago": 1.0, "long ago": 1000.0, "never": 0.0}[seen_before])

    def listing_first(look: Callable[[], Any], listing: Callable[[], Any]) -> tuple[Any, Any]:
        listed = listing()
        contribute_all(store, range(1, 2))
        beat_all(store, range(1, 2), count=2, state="left")
        return look(), listed

    monkeypatch.setattr("diloco.exchange.round_observer.run_both", listing_first)
    view = round_observer.before_plan(1, Base(round=0, digest=""), waited_s=60.0, sync_s=0.0)
    assert (set(view.contributions), view.expected) == ({1}, set())


def test_the_first_process_of_a_large_group_reads_leases_at_its_second_look(
    tmp_path: Path,
) -> None:
    """Of the replicas that contribute between the two no lease is read."""
    store, round_observer = make(tmp_path, num_replicas=32, max_replicas=32, min_quorum=16)
    beat_all(store, range(1, 32))
    contribute_all(store, range(1))
    assert leases_read(store, lambda: seen(round_observer)) == set()
    assert round_observer.expects_more
    assert keys.awaited(1) not in [info.key for info in store.list(keys.ROUNDS)]
    contribute_all(store, range(1, 15))
    assert leases_read(store, lambda: seen(round_observer)) == set(range(15, 32))
    assert not round_observer.expects_more
    assert keys.awaited(1) in [info.key for info in store.list(keys.ROUNDS)]


def test_leases_of_a_large_group_are_read_at_once_if_a_plan_is_possible(tmp_path: Path) -> None:
    store, round_observer = make(tmp_path, num_replicas=32, max_replicas=32, min_quorum=16)
    beat_all(store, range(1, 32))
    contribute_all(store, range(16))
    assert leases_read(store, lambda: seen(round_observer)) == set(range(16, 32))


def test_a_later_look_lists_before_it_reads_many_leases(tmp_path: Path) -> None:
    store, round_observer = make(tmp_path, num_replicas=32, max_replicas=32, min_quorum=1)
    beat_all(store, range(1, 32))
    contribute_all(store, range(1))
    seen(round_observer)
    contribute_all(store, range(31))
    base, later_s = Base(round=0, digest=""), 2.0
    look = lambda: round_observer.before_plan(1, base, waited_s=later_s, sync_s=0.0)  # noqa: E731
    assert leases_read(store, look) == {31}


def test_a_listing_asks_the_missing_calm_replicas_for_heartbeats(tmp_path: Path) -> None:
    store, round_observer = make(tmp_path)
    beat_all(store, range(3))
    for replica in (0, 1):
        key = keys.contribution_record(1, replica, "00001-00000000")
        store.put(key, record(replica).to_bytes())
    seen(round_observer)
    assert [i.key for i in store.list(keys.ROUNDS) if i.key == keys.awaited(1)]


def test_a_listing_that_finds_all_contributions_asks_for_nothing(tmp_path: Path) -> None:
    store, round_observer = make(tmp_path)
    beat_all(store, range(2))
    for replica in (0, 1):
        key = keys.contribution_record(1, replica, "00001-00000000")
        store.put(key, record(replica).to_bytes())
    seen(round_observer)
    assert keys.awaited(1) not in [info.key for info in store.list(keys.ROUNDS)]


@pytest.mark.parametrize("owners", [3, 16])
def test_leases_of_owners_are_read_with_the_second_listing(tmp_path: Path, owners: int) -> None:
    store, round_observer = make(tmp_path)
    beat_all(store, range(owners))
    plan = Plan(
        round=1,
        fragment=0,
        mode="sharded",
        planner=ME,
        contributions=(),
        owners=tuple(range(owners)),
        wall_s=0.0,
    )
    look = lambda: round_observer.reduced_shards(plan)  # noqa: E731
    assert leases_read(store, look) == set()
    assert leases_read(store, look) == set(range(owners))


def test_commits_are_read_ahead_up_to_a_missing_or_damaged_one(tmp_path: Path) -> None:
    store, round_observer = make(tmp_path)
    for round in (3, 4, 5, 7):
        store.put(keys.commit(round), a_commit(round).to_bytes())
    store.put(keys.commit(5), a_commit(6).to_bytes())  # another round's
    round_observer.read_ahead(3)
    assert [commit.round for commit in round_observer.known_commits()] == [3, 4]
