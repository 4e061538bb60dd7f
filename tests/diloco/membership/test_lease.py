"""Leases judged on the observer's own clock, commands, retries and telemetry numbering."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diloco.membership.lease import LIST_EVERY, Lease, Observer, claim_incarnation
from diloco.protocol import keys
from diloco.protocol.records import Beat, Command, Identity
from diloco.protocol.telemetry import Segment
from diloco.store.base import LocalStore, StoreDenied, StoreUnavailable
from diloco.store.retry import RetryingStore
from diloco.telemetry.writer import Reporter

ME = Identity(replica=1, incarnation="00001-00000000")


class ManualClock:
    """Time moves only when somebody sleeps."""

    now_s = 0.0

    def wall(self) -> float:
        return 1e9 + self.now_s

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def beat(**changes: object) -> Beat:
    first = Beat(
        replica=7, incarnation="00001-00000000", count=1, interval_s=2.0, state="computing",
        round=3, step=0, tokens=0, started_wall_s=0.0, wall_s=0.0,
    )  # fmt: skip
    return dataclasses.replace(first, **changes)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def write(store: LocalStore, a_beat: Beat) -> None:
    store.put(keys.beat(a_beat.replica, a_beat.incarnation), a_beat.to_bytes())


def test_a_lease_that_does_not_change_dies_on_the_observers_clock(store: LocalStore) -> None:
    clock = ManualClock()
    observer = Observer(store, clock=clock, timeout_s=10)
    write(store, beat(wall_s=-1e12))  # what the other machine's clock says is nobody's business
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


def test_one_that_left_or_is_in_a_later_round_is_not_waited_for(store: LocalStore) -> None:
    observer = Observer(store, clock=ManualClock(), timeout_s=10)
    write(store, beat(replica=1, state="done"))
    write(store, beat(replica=2, state="failed"))
    write(store, beat(replica=3, round=4))
    write(store, beat(replica=4, round=2))
    observer.look()
    assert observer.live() == {3, 4}
    assert observer.working_towards(3) == {4}


def test_only_the_newest_incarnation_counts_and_a_bad_lease_is_passed_over(
    store: LocalStore,
) -> None:
    observer = Observer(store, clock=ManualClock(), timeout_s=10)
    write(store, beat())
    write(store, beat(incarnation="00002-00000000", state="left"))
    store.put(keys.beat(8, "00001-00000000"), b"not json")
    observer.look()
    assert observer.live() == frozenset()


def test_every_process_start_is_a_higher_incarnation(store: LocalStore) -> None:
    assert claim_incarnation(store, 7, nonce="ffffffff").incarnation == "00001-ffffffff"
    write(store, beat())
    assert claim_incarnation(store, 7, nonce="00000000").incarnation == "00002-00000000"
    assert claim_incarnation(store, 7, nonce="00000000").incarnation == "00003-00000000"
    assert claim_incarnation(store, 8, nonce="00000000").incarnation == "00001-00000000"


def test_a_stale_list_gives_no_process_a_number_that_was_taken(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An incarnation with a number of a process that has died can be the lower one: the new process
    is then fenced out, and is not started again."""
    first = claim_incarnation(store, 7, nonce="ffffffff")
    monkeypatch.setattr(store, "list", lambda prefix: [])
    assert claim_incarnation(store, 7, nonce="00000000") > first


def lease(store: LocalStore, on_drain: Callable[[float, str], None] | None = None) -> Lease:
    return Lease(
        store, ME, clock=ManualClock(), interval_s=1.0, heartbeat_timeout_s=10.0, device="cpu",
        on_drain=on_drain,
    )  # fmt: skip


def test_commands_are_obeyed_in_order_and_bad_ones_passed_over(store: LocalStore) -> None:
    store.put(keys.control(1), b"{}")
    store.put(keys.control(2), Command(n=2, command="dance", wall_s=0.0).to_bytes())
    store.put(keys.control(3), Command(n=3, command="stop", replica=9, wall_s=0.0).to_bytes())
    mine = lease(store)
    mine.look_around()
    assert not mine.stop_requested
    store.put(keys.control(4), Command(n=4, command="stop", wall_s=0.0).to_bytes())
    mine.look_around()
    assert mine.stop_requested


def test_commands_after_a_lost_one_are_obeyed(store: LocalStore) -> None:
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


def test_a_number_far_beyond_hides_no_command(store: LocalStore) -> None:
    store.put(keys.control(99_999_999), Command(n=99_999_999, command="stop", wall_s=0).to_bytes())
    mine = lease(store)
    mine.look_around()
    assert not mine.stop_requested
    store.put(keys.control(1), Command(n=1, command="stop", wall_s=0.0).to_bytes())
    mine.look_around()
    assert mine.stop_requested


def test_a_resume_takes_back_the_stops_before_it_and_no_later_one(store: LocalStore) -> None:
    for n, name in enumerate(("stop", "stop", "resume"), start=1):
        store.put(keys.control(n), Command(n=n, command=name, wall_s=0.0).to_bytes())
    mine = lease(store)
    mine.look_around()
    assert not mine.stop_requested
    store.put(keys.control(4), Command(n=4, command="stop", wall_s=0.0).to_bytes())
    mine.look_around()
    assert mine.stop_requested


@pytest.mark.parametrize("round", [None, True, -1, "3"])
def test_a_save_says_after_which_round(store: LocalStore, round: object) -> None:
    mine = lease(store)
    for n, value in enumerate((3, round), start=1):
        command = Command(n=n, command="save", arguments={"round": value}, wall_s=0.0)
        store.put(keys.control(n), command.to_bytes())
    mine.look_around()
    assert mine.save_after == 3


def drain(store: LocalStore, n: int, **arguments: object) -> None:
    command = Command(n=n, command="drain", replica=1, arguments=arguments, wall_s=0.0)
    store.put(keys.control(n), command.to_bytes())


def test_a_drain_is_for_the_process_it_was_written_for(store: LocalStore) -> None:
    told: list[tuple[float, str]] = []
    drain(store, 1)
    drain(store, 2, incarnation="00000-ffffffff")
    drain(store, 3, incarnation=ME.incarnation, reason="named")
    mine = lease(store, on_drain=lambda within_s, reason: told.append((within_s, reason)))
    mine.start()
    mine.end("left")
    assert told == [(30.0, "named")], "the first was for an earlier one, the second names it"
    drain(store, 4, within_s=5)
    drain(store, 5, incarnation="00000-ffffffff")
    drain(store, 6, incarnation="00002-00000000", within_s=0.5, reason="x" * 1000)
    mine.look_around()
    assert told[1:] == [(5.0, "drained by command 4"), (0.5, "x" * 200)]


@pytest.mark.parametrize(
    "arguments",
    [
        {"within_s": "soon"}, {"within_s": True}, {"within_s": -1}, {"within_s": float("nan")},
        {"within_s": float("inf")}, {"reason": 3}, {"incarnation": 3},
    ],
)  # fmt: skip
def test_a_drain_that_says_nonsense_is_refused(
    store: LocalStore, arguments: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    told: list[object] = []
    mine = lease(store, on_drain=lambda *what: told.append(what))
    drain(store, 1, **arguments)
    mine.look_around()
    assert not told
    assert "command 1 is refused: " in caplog.text and "expected" in caplog.text


def test_a_fenced_lease_says_nothing_more(store: LocalStore) -> None:
    mine = lease(store)
    mine.beat()
    write(store, beat(replica=1, incarnation="00002-00000000"))
    mine.look_around()
    assert mine.fenced
    before = store.get(keys.beat(1, ME.incarnation))
    mine.end("failed")
    assert store.get(keys.beat(1, ME.incarnation)) == before


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


def test_a_store_that_recovers_is_waited_for(tmp_path: Path) -> None:
    store, clock = retrying(Flaky(tmp_path, 4))
    store.put("a", b"1")
    assert store.get("a") == b"1"
    assert 0.5 < clock.now_s < 5


def test_a_store_that_does_not_is_given_up_within_the_deadline(tmp_path: Path) -> None:
    store, clock = retrying(Flaky(tmp_path, 1000))
    with pytest.raises(StoreUnavailable, match="503"):
        store.put("a", b"1")
    assert 10 < clock.now_s <= 30


def test_a_create_whose_answer_was_lost_is_still_ours(tmp_path: Path) -> None:
    store, _ = retrying(Flaky(tmp_path, 1, after=True))
    assert store.create("a", b"written by me") is True
    assert store.create("a", b"written by another") is False


def test_what_waiting_cannot_mend_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    store, clock = retrying(LocalStore(tmp_path))
    with pytest.raises(StoreDenied):
        store.put("a/b", b"")
    assert clock.now_s == 0


def test_a_segment_that_could_not_be_written_keeps_its_number(tmp_path: Path) -> None:
    store = Flaky(tmp_path, 1)
    reporter = Reporter(store, ME, clock=ManualClock(), interval_s=1.0)
    numbers = {"round": 1, "tokens": 8, "lr": 0.1, "grad_norm": 1.0, "step_s": 0.1}
    reporter.step(step=0, loss=torch.tensor(2.5), **numbers)  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable):
        reporter.flush()
    reporter.step(step=1, loss=1.5, **numbers)  # type: ignore[arg-type]
    reporter.flush()
    read = [Segment.from_bytes(store.get(keys.telemetry(1, ME.incarnation, n))) for n in (1, 2)]
    assert [segment.steps.loss for segment in read] == [(2.5,), (1.5,)]
    reporter.flush()
    assert len(store.list("telemetry/")) == 2, "nothing to tell, nothing written"


def test_a_flood_of_log_lines_is_cut_and_says_so(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    reporter = Reporter(store, ME, clock=ManualClock(), interval_s=1.0)
    for n in range(Reporter.MAX_LOGS + 5):
        reporter.log("INFO", str(n))
    reporter.flush()
    segments = [info.key for info in store.list("telemetry/")]
    logs = [line for key in segments for line in Segment.from_bytes(store.get(key)).logs]
    assert logs[0].message == "5 older log lines were dropped"
    assert [logs[1].message, logs[-1].message] == ["5", str(Reporter.MAX_LOGS + 4)]
