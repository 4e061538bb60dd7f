"""Prefixes with more objects than a listing returns: the failure is attributed to the run, not to
the store that other runs share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.store.base import ListingTooLong, LocalStore, StoreUnavailable
from runs import live_stream, tasks
from runs.actions import deletion, replicas_and_pools
from runs.backends import shared_breakers
from runs.exceptions import LaunchLater
from runs.ingest import leases, quarantine, round_reader
from runs.ingest.quarantine import GuardedStore, PassTimeout, Quarantine
from runs.ingest.stores import BoundedStore
from runs.models import Alert, Contribution, IngestState, QuarantinedRecord

pytestmark = pytest.mark.django_db


@pytest.fixture
def harness(make_harness: Callable[..., Any]) -> Any:
    made = make_harness(replicas=2, total_rounds=70)
    made.start()
    return made


@pytest.fixture
def redis(valkey: str, settings: Any) -> Any:
    settings.REDIS_URL = valkey
    live_stream.client().flushall()
    return live_stream.client()


@pytest.fixture
def flooded(harness: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replica 1 has written more objects below its own folder than are listed."""
    monkeypatch.setattr(leases, "MEMBERS_LISTED", 10)
    monkeypatch.setattr(leases, "MEMBER_LISTED", 5)
    for n in range(20):
        harness.bucket.store.put(f"{keys.member(1)}flood/{n}", b"")
    return harness


def test_a_replica_that_floods_its_prefix_is_reported_and_others_are_read(flooded: Any) -> None:
    flooded.bucket.beat(0, 50, step=7)
    flooded.bucket.beat(1, 60)
    flooded.bucket.commit(1, (0, 1))
    flooded.tick()
    assert flooded.run.committed_rounds == 1
    assert (flooded.replica(0).beat_count, flooded.replica(1).beat_count) == (50, 60)
    state = IngestState.objects.get(run=flooded.run)
    assert (state.trouble, state.quarantined) == ("", 1)
    [row] = QuarantinedRecord.objects.filter(run=flooded.run)
    assert (row.key, row.replica) == (keys.member(1), flooded.replica(1))
    assert "expected at most 5 objects, found more" in row.reason
    [event] = flooded.events("quarantined")
    assert event.startswith(f"{keys.member(1)} is quarantined: {keys.member(1)}: expected at most")
    assert Alert.objects.filter(run=flooded.run, kind="quarantined").exists()


def test_a_flood_opens_the_breaker_of_its_own_run_only(
    flooded: Any, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = str(flooded.run.pk)
    monkeypatch.setattr("runs.backends.shared_breakers.OPEN_S", 600.0)
    for _ in range(3):
        tasks.ingest_run(run_id)
    assert not shared_breakers.is_open(shared_breakers.store_place(flooded.run))
    assert shared_breakers.is_open(shared_breakers.prefix_place(run_id))
    tasks._wait_for_store(run_id)  # nothing keeps a launch from the store


def test_a_part_whose_listing_is_too_long_fails_alone(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(*_: Any, **__: Any) -> Any:
        raise ListingTooLong("checkpoints/", "expected at most 3 objects, found more")

    monkeypatch.setattr("runs.ingest.ingest_pass.ingest_checkpoints", endless)
    harness.bucket.commit(1, (0, 1))
    harness.bucket.segment(0, 1, losses=(3.0,))
    harness.tick()
    assert (harness.run.committed_rounds, harness.replica(0).loss) == (1, 3.0)
    assert "checkpoints" in IngestState.objects.get(run=harness.run).message
    [row] = QuarantinedRecord.objects.filter(run=harness.run)
    assert row.key == "checkpoints/"


def test_a_round_with_too_many_contributions_is_read_from_its_plan(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_reader, "CONTRIBUTIONS_LISTED", 6)
    for replica in (0, 1):
        harness.bucket.contribution(1, replica)
    harness.bucket.plan(1, (0, 1))
    harness.bucket.commit(1, (0, 1))
    for n in range(9):
        harness.bucket.store.put(f"{keys.contributions(1)}flood-{n}", b"")
    harness.tick()
    assert harness.run.committed_rounds == 1
    result = Contribution.objects.filter(round__run=harness.run, round__number=1)
    read = result.exclude(uploaded_at=None).values_list("replica__number", flat=True)
    assert set(read) == {0, 1}
    assert any("expected at most 6 objects" in text for text in harness.events("refused"))


def test_a_run_with_too_many_objects_can_be_stopped(flooded: Any) -> None:
    replicas_and_pools.request_stop(flooded.run, actor=flooded.run.owner)
    flooded.tick()
    assert flooded.run.stop_sent_at is not None
    assert flooded.bucket.store.get(keys.control(1))


# -- the store, bounded ------------------------------------------------------------------------


def test_a_hanging_listing_is_not_a_failure_of_a_store_that_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    never = threading.Event()
    monkeypatch.setattr(LocalStore, "list", lambda *_, **__: never.wait() or [])
    store = BoundedStore(LocalStore(tmp_path), patience_s=5.0)
    with pytest.raises(ListingTooLong, match="members/: expected a listing within 5 s"):
        store.list("members/")
    monkeypatch.setattr(LocalStore, "get_range", lambda *_, **__: never.wait() or b"")
    with pytest.raises(StoreUnavailable, match="members/: no answer within"):
        store.list("members/")
    never.set()


@pytest.mark.parametrize(("requests", "error"), [(100, PassTimeout), (3, StoreUnavailable)])
def test_many_slow_records_are_not_a_failure_of_the_store(
    harness: Any, requests: int, error: type[Exception]
) -> None:
    now_s = [0.0]

    class Slow(LocalStore):
        def list(self, prefix: str, **more: Any) -> Any:
            now_s[0] += quarantine.PATIENCE_S / requests
            return []

    inner = Slow(Path(harness.bucket.store.inner.root))
    pass_ = Quarantine(harness.run, now=harness.clock())
    store = GuardedStore(inner, pass_, clock=lambda: now_s[0])
    for _ in range(requests):
        store.list("rounds/")
    with pytest.raises(error):
        store.list("rounds/")


# -- deletion ----------------------------------------------------------------------------------


def test_a_deletion_goes_page_by_page_and_resumes(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = harness.bucket.store
    monkeypatch.setattr("diloco.store.base.PAGE_OBJECTS", 5)
    for n in range(30):
        harness.bucket.segment(0, n + 1)
        store.put(f"not-of-the-run/{n}", b"")
    with pytest.raises(LaunchLater, match="more are left"):
        deletion._delete_pages(store, clock=iter(range(0, 10**6, 40)).__next__)
    assert store.get(keys.OWNER)
    kept, names = deletion._delete_pages(store)
    assert kept == 30
    assert len(names) == deletion.NAMED
    left = {info.key for info in store.list("")}
    assert {key for key in left if not key.startswith("not-of")} == {keys.GROUP, keys.OWNER}


def test_a_plan_of_a_deletion_ends_in_time(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.store.base.PAGE_OBJECTS", 2)
    clock = iter(range(0, 10**6, 3)).__next__
    result, whole = deletion._first_pages(harness.bucket.store, clock=clock)
    assert not whole
    assert result
    assert deletion.plan_deletion(harness.run).whole
