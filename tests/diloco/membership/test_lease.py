"""Leases on the observer's clock, commands, retries and telemetry numbers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diloco.clock import SystemClock
from diloco.membership.lease import LIST_EVERY, Lease, claim_incarnation
from diloco.membership.observer import Observer
from diloco.protocol import keys
from diloco.protocol.control_pace import CHECK_EVERY
from diloco.protocol.records import Command, Identity
from diloco.protocol.telemetry import Segment
from diloco.store.base import (
    LISTED,
    LocalStore,
    ObjectInfo,
    StoreDenied,
    StoreUnavailable,
)
from diloco.store.retry import RetryingStore
from diloco.telemetry.writer import TelemetryWriter
from tests.diloco.clocks import ManualClock
from tests.diloco.membership.lease_harness import ME, beat, write


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_an_unchanged_lease_expires_on_the_observers_clock(store: LocalStore) -> None:
    clock = ManualClock()
    observer = Observer(store, clock=clock, timeout_s=10)
    write(store, beat(wall_s=-1e12))  # the other machine's clock is ignored
    observer.look()
    clock.now_s = 9.9
    observer.look()
    assert observer.live() == {7}
    clock.now_s = 10.0
    observer.look()
    assert observer.live() == frozenset()
    write(store, beat(count=2))
    observer.look()
    assert observer.live() == {7}


def test_rounds_do_not_wait_for_ended_or_later_replicas(store: LocalStore) -> None:
    observer = Observer(store, clock=ManualClock(), timeout_s=10)
    write(store, beat(replica=1, state="done"))
    write(store, beat(replica=2, state="failed"))
    write(store, beat(replica=3, round=4))
    write(store, beat(replica=4, round=2))
    observer.look()
    assert observer.live() == {3, 4}
    assert observer.working_towards(3) == {4}


def test_the_newest_incarnation_counts_and_invalid_leases_are_skipped(
    store: LocalStore,
) -> None:
    observer = Observer(store, clock=ManualClock(), timeout_s=10)
    write(store, beat())
    write(store, beat(incarnation="00002-00000000", state="left"))
    store.put(keys.beat(8, "00001-00000000"), b"not json")
    observer.look()
    assert observer.live() == frozenset()


def test_every_process_claims_a_higher_incarnation(store: LocalStore) -> None:
    assert claim_incarnation(store, 7, nonce="ffffffff").incarnation == "00001-ffffffff"
    write(store, beat())
    assert claim_incarnation(store, 7, nonce="00000000").incarnation == "00002-00000000"
    assert claim_incarnation(store, 7, nonce="00000000").incarnation == "00003-00000000"
    assert claim_incarnation(store, 8, nonce="00000000").incarnation == "00001-00000000"


def test_a_stale_listing_does_not_duplicate_an_incarnation(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process that reuses the number of a dead one can have the lower incarnation, and would
    be fenced out."""
    first = claim_incarnation(store, 7, nonce="ffffffff")
    monkeypatch.setattr(store, "list", lambda prefix: [])
    assert claim_incarnation(store, 7, nonce="00000000") > first


def lease(
    store: LocalStore,
    on_drain: Callable[[float, str], None] | None = None,
    identity: Identity = ME,
) -> Lease:
    return Lease(
        store,
        identity,
        clock=ManualClock(),
        interval_s=1.0,
        heartbeat_timeout_s=10.0,
        device="cpu",
        on_drain=on_drain,
    )


def test_commands_run_in_order_and_invalid_ones_are_skipped(store: LocalStore) -> None:
    store.put(keys.control(1), b"{}")
    store.put(keys.control(2), Command(n=2, command="dance", wall_s=0.0).to_bytes())
    store.put(keys.control(3), Command(n=3, command="stop", replica=9, wall_s=0.0).to_bytes())
    own_lease = lease(store)
    own_lease.look_around()
    assert not own_lease.stop_requested
    store.put(keys.control(4), Command(n=4, command="stop", wall_s=0.0).to_bytes())
    own_lease.look_around()
    assert own_lease.stop_requested


def test_commands_after_a_lost_one_run(store: LocalStore) -> None:
    store.put(keys.control(2), Command(n=2, command="stop", wall_s=0.0).to_bytes())
    started_later = lease(store)
    started_later.look_around()
    assert started_later.stop_requested

    store.delete([keys.control(2)])
    running = lease(store)
    running.look_around()
    store.put(keys.control(3), Command(n=3, command="stop", wall_s=0.0).to_bytes())
    for _ in range(LIST_EVERY):
        running.look_around()
    assert running.stop_requested


def test_a_distant_command_number_hides_no_command(store: LocalStore) -> None:
    store.put(keys.control(99_999_999), Command(n=99_999_999, command="stop", wall_s=0).to_bytes())
    own_lease = lease(store)
    own_lease.look_around()
    assert not own_lease.stop_requested
    store.put(keys.control(1), Command(n=1, command="stop", wall_s=0.0).to_bytes())
    own_lease.look_around()
    assert own_lease.stop_requested


def test_a_resume_cancels_only_earlier_stops(store: LocalStore) -> None:
    for n, name in enumerate(("stop", "stop", "resume"), start=1):
        store.put(keys.control(n), Command(n=n, command=name, wall_s=0.0).to_bytes())
    own_lease = lease(store)
    own_lease.look_around()
    assert not own_lease.stop_requested
    store.put(keys.control(4), Command(n=4, command="stop", wall_s=0.0).to_bytes())
    own_lease.look_around()
    assert own_lease.stop_requested


@pytest.mark.parametrize("round", [None, True, -1, "3"])
def test_a_save_command_has_a_round(store: LocalStore, round: object) -> None:
    own_lease = lease(store)
    for n, value in enumerate((3, round), start=1):
        command = Command(n=n, command="save", arguments={"round": value}, wall_s=0.0)
        store.put(keys.control(n), command.to_bytes())
    own_lease.look_around()
    assert own_lease.save_after == 3


def drain(store: LocalStore, n: int, **arguments: object) -> None:
    command = Command(n=n, command="drain", replica=1, arguments=arguments, wall_s=0.0)
    store.put(keys.control(n), command.to_bytes())


def test_a_drain_applies_to_its_target_process(store: LocalStore) -> None:
    drains: list[tuple[float, str]] = []
    drain(store, 1)
    drain(store, 2, incarnation="00000-ffffffff")
    drain(store, 3, incarnation=ME.incarnation, reason="named")
    own_lease = lease(store, on_drain=lambda within_s, reason: drains.append((within_s, reason)))
    own_lease.start()
    own_lease.end("left")
    assert drains == [(30.0, "named")], (
        "the first is for an earlier process, the second names this one"
    )
    drain(store, 4, within_s=5)
    drain(store, 5, incarnation="00000-ffffffff")
    drain(store, 6, incarnation="00002-00000000", within_s=0.5, reason="x" * 1000)
    own_lease.look_around()
    assert drains[1:] == [(5.0, "drained by command 4"), (0.5, "x" * 200)]


@pytest.mark.parametrize(
    "arguments",
    [
        {"within_s": "soon"},
        {"within_s": True},
        {"within_s": -1},
        {"within_s": float("nan")},
        {"within_s": float("inf")},
        {"reason": 3},
        {"incarnation": 3},
    ],
)
def test_an_invalid_drain_is_refused(
    store: LocalStore, arguments: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    drains: list[object] = []
    own_lease = lease(store, on_drain=lambda *what: drains.append(what))
    drain(store, 1, **arguments)
    own_lease.look_around()
    assert not drains
    assert "command 1 is refused: " in caplog.text and "expected" in caplog.text


def test_a_fenced_lease_writes_no_heartbeat(store: LocalStore) -> None:
    own_lease = lease(store)
    own_lease.beat()
    write(store, beat(replica=1, incarnation="00002-00000000"))
    own_lease.look_around()
    assert own_lease.fenced
    before = store.get(keys.beat(1, ME.incarnation))
    own_lease.end("failed")
    assert store.get(keys.beat(1, ME.incarnation)) == before


def test_heartbeats_go_on_after_an_unexpected_error(
    store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    own_lease = Lease(
        store, ME, clock=SystemClock(), interval_s=0.01, heartbeat_timeout_s=0.05, device="cpu"
    )
    beats = iter([KeyError("a fault"), None])
    goes_on = threading.Event()
    write_beat = own_lease.beat_if_due

    def beat_if_due() -> None:
        if error := next(beats, None):
            raise error
        write_beat()
        goes_on.set()

    own_lease.beat_if_due = beat_if_due  # type: ignore[method-assign]
    own_lease.start()
    try:
        assert goes_on.wait(600)
    finally:
        own_lease.end("left")
    assert "KeyError: 'a fault'" in caplog.text


class CountedStore(LocalStore):
    """Records the keys that are read and the prefixes that are listed."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.requests: list[str] = []

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.requests.append(f"get {key}")
        return super().get_range(key, start, length)

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        self.requests.append(f"get {key}")
        return super().get(key, limit=limit)

    def list(self, prefix: str, *, limit: int = LISTED) -> list[ObjectInfo]:
        self.requests.append(f"list {prefix}")
        return super().list(prefix, limit=limit)


def test_a_newer_process_is_found_by_one_get(tmp_path: Path) -> None:
    counted = CountedStore(tmp_path)
    first = claim_incarnation(counted, 1, nonce="ffffffff")
    own_lease = lease(counted, identity=first)
    own_lease.look_around()  # the first look lists
    counted.requests.clear()
    own_lease.look_around()
    assert counted.requests == [f"get {keys.claim(1, 2)}", f"get {keys.control(1)}"]
    assert not own_lease.fenced
    claim_incarnation(counted, 1, nonce="00000000")
    own_lease.look_around(newer=False)
    assert not own_lease.fenced
    own_lease.look_around()
    assert own_lease.fenced


def test_without_atomic_create_a_newer_process_is_found_by_its_lease(tmp_path: Path) -> None:
    counted = CountedStore(tmp_path)
    counted.atomic_create = False
    own_lease = lease(counted)
    for _ in range(2):
        own_lease.look_around()
    write(counted, beat(replica=1, incarnation="00002-00000000"))
    own_lease.look_around()
    assert own_lease.fenced


def test_a_newer_process_is_found_although_its_claim_is_lost(store: LocalStore) -> None:
    own_lease = lease(store)
    own_lease.look_around()
    write(store, beat(replica=1, incarnation="00002-00000000"))
    for _ in range(LIST_EVERY):
        own_lease.look_around()
    assert own_lease.fenced


def test_a_failed_read_does_not_end_the_listings_of_processes(store: LocalStore) -> None:
    """The thread checks for newer processes at every fifth look only."""
    own_lease = lease(store)
    for look in range(1, 8):
        own_lease.look_around(newer=look % CHECK_EVERY == 0)
    own_lease._looks -= 1  # a look that failed before it read the commands
    write(store, beat(replica=1, incarnation="00002-00000000"))
    for look in range(8, 8 + 2 * LIST_EVERY):
        own_lease.look_around(newer=look % CHECK_EVERY == 0)
    assert own_lease.fenced


class Flaky(LocalStore):
    """Fails ``failures`` times, then works; ``after`` makes the failed create succeed unseen."""

    def __init__(self, root: Path, failures: int, *, after: bool = False) -> None:
        super().__init__(root)
        self.failures = failures
        self.after = after

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("503")

    def put(self, key: str, data: object) -> None:
        self._fail()
        super().put(key, data)  # type: ignore[arg-type]

    def create(self, key: str, data: object) -> bool:
        if self.after and self.failures:
            super().create(key, data)  # type: ignore[arg-type]
        self._fail()
        return super().create(key, data)  # type: ignore[arg-type]


def retrying(inner: LocalStore) -> tuple[RetryingStore, ManualClock]:
    clock = ManualClock()
    return RetryingStore(inner, clock=clock, rng=random.Random(0), deadline_s=30.0), clock


def test_start_waits_for_a_store_that_recovers(tmp_path: Path) -> None:
    store, clock = retrying(Flaky(tmp_path, 4))
    store.put("a", b"1")
    assert store.get("a") == b"1"
    assert 0.5 < clock.now_s < 5


def test_start_gives_up_after_the_deadline(tmp_path: Path) -> None:
    store, clock = retrying(Flaky(tmp_path, 1000))
    with pytest.raises(StoreUnavailable, match="503"):
        store.put("a", b"1")
    assert 10 < clock.now_s <= 30


def test_a_create_with_a_lost_response_is_recognised(tmp_path: Path) -> None:
    store, _ = retrying(Flaky(tmp_path, 1, after=True))
    assert store.create("a", b"written by me") is True
    assert store.create("a", b"written by another") is False


def test_permanent_errors_are_not_retried(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    store, clock = retrying(LocalStore(tmp_path))
    with pytest.raises(StoreDenied):
        store.put("a/b", b"")
    assert clock.now_s == 0


def test_an_unwritten_segment_keeps_its_number(tmp_path: Path) -> None:
    store = Flaky(tmp_path, 1)
    telemetry = TelemetryWriter(store, ME, clock=ManualClock(), interval_s=1.0)
    numbers = {"round": 1, "tokens": 8, "lr": 0.1, "grad_norm": 1.0, "step_s": 0.1}
    telemetry.step(step=0, loss=torch.tensor(2.5), **numbers)  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable):
        telemetry.flush()
    telemetry.step(step=1, loss=1.5, **numbers)  # type: ignore[arg-type]
    telemetry.flush()
    read = [Segment.from_bytes(store.get(keys.telemetry(1, ME.incarnation, n))) for n in (1, 2)]
    assert [segment.steps.loss for segment in read] == [(2.5,), (1.5,)]
    telemetry.flush()
    assert len(store.list("telemetry/")) == 2, "without new rows nothing is written"


def test_excess_log_lines_are_dropped_and_counted(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    telemetry = TelemetryWriter(store, ME, clock=ManualClock(), interval_s=1.0)
    for n in range(TelemetryWriter.MAX_LOGS + 5):
        telemetry.log("INFO", str(n))
    telemetry.flush()
    segments = [info.key for info in store.list("telemetry/")]
    logs = [line for key in segments for line in Segment.from_bytes(store.get(key)).logs]
    assert logs[0].message == "5 older log lines were dropped"
    assert [logs[1].message, logs[-1].message] == ["5", str(TelemetryWriter.MAX_LOGS + 4)]
