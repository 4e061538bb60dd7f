"""A replica too slow for the grace window contributes the steps it has."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from diloco.exchange.timings import Timings
from diloco.protocol import keys
from diloco.protocol.records import Identity
from diloco.protocol.settings import GroupSettings
from diloco.store.base import StoreUnavailable
from diloco.training.partial_round import PartialRounds
from tests.diloco.model.harness import Harness, virtual
from tests.diloco.model.test_scenarios import make_harness, run
from tests.diloco.model.virtual_time import Process
from tests.matrix import matrix

STEPS = 100


def processes(*replicas: int, incarnation: str = "00001-aaaaaaaa") -> frozenset[Identity]:
    return frozenset(Identity(replica=r, incarnation=incarnation) for r in replicas)


class PartialHarness:
    """A replica of one step a second in a round of 100 steps, for which others wait; looks every
    three seconds."""

    def __init__(self, **changes: Any) -> None:
        chosen = {"partial_rounds": "on", "min_quorum": 2, "grace_s": 20.0, **changes}
        self.now_s = 0.0
        self.looks: list[float] = []
        self.there: frozenset[Identity] = frozenset()
        self.error: Exception | None = None
        self.answers = True
        """Whether a listing ends at once; otherwise :meth:`answer` ends it."""
        self.hanging: list[tuple[Callable[[], Any], Future[Any]]] = []
        self.counter = SimpleNamespace(steps_in_round=0, compute_in_round_s=0.0)
        self.earlier: object = None
        progress: Any = SimpleNamespace(
            settings=GroupSettings(**chosen),
            counter=self.counter,
            earlier_contributor=lambda round: self.earlier,
        )
        observer: Any = SimpleNamespace(contributors=self._contributors)
        clock: Any = SimpleNamespace(monotonic=lambda: self.now_s)
        self.lease: Any = SimpleNamespace(is_awaited=True)
        self.running = processes(0, 2)
        """The processes whose lease changes."""
        leases: Any = SimpleNamespace(
            look=lambda *, only: None,
            has_changed=lambda replica: True,
            newest_process=lambda replica: next(
                (one for one in self.running if one.replica == replica), None
            ),
        )
        self.partial = PartialRounds(
            progress, observer, lease=self.lease, observer=leases, clock=clock
        )

    def _contributors(self, round: int) -> frozenset[Identity]:
        self.looks.append(self.now_s)
        if self.error:
            raise self.error
        return self.there

    def steps(self, until: int) -> int | None:
        """Make steps up to ``until``; return the step at which the round must end."""
        with mock.patch.multiple(
            "diloco.training.partial_round", call_in_daemon=self._call, wait=lambda *a, **kw: None
        ):
            while self.counter.steps_in_round < until:
                self.now_s += 1
                self.counter.steps_in_round += 1
                self.counter.compute_in_round_s += 1.0
                if self.partial.must_end(1, steps=STEPS):
                    return int(self.counter.steps_in_round)
        return None

    def _call(self, listing: Callable[[], Any], *, name: str) -> Future[Any]:
        future: Future[Any] = Future()
        self.hanging.append((listing, future))
        if self.answers:
            self.answer()
        return future

    def answer(self) -> None:
        """End the listings that have begun."""
        for listing, future in self.hanging:
            try:
                future.set_result(listing())
            except StoreUnavailable as error:
                future.set_exception(error)
        self.hanging.clear()


def test_the_round_ends_once_the_quorum_is_seen_and_the_window_is_too_short() -> None:
    harness = PartialHarness()
    harness.there = processes(0)
    assert harness.steps(30) is None, "no quorum yet"
    harness.there = processes(0, 2)
    assert harness.steps(STEPS) == 31


def test_a_replica_that_can_finish_within_the_window_makes_all_steps() -> None:
    harness = PartialHarness(grace_s=60.0)
    harness.steps(50)
    harness.there = processes(0, 2)
    assert harness.steps(STEPS) is None


def test_the_upload_must_fit_into_the_window_too() -> None:
    harness = PartialHarness(grace_s=60.0)
    timings = Timings(SimpleNamespace())  # type: ignore[arg-type]
    timings.seconds |= {"encode": 5.0, "upload": 15.0, "wait": 100.0}
    harness.partial.contributed(timings)
    harness.steps(50)
    harness.there = processes(0, 2)
    assert harness.steps(STEPS) == 57


def test_it_looks_every_fifth_of_the_heartbeat_timeout_until_the_quorum_is_there() -> None:
    harness = PartialHarness()
    harness.steps(10)
    assert harness.looks == [4.0, 7.0, 10.0]
    harness.there = processes(0, 2)
    harness.steps(STEPS)
    assert harness.looks == [4.0, 7.0, 10.0, 13.0]


def test_it_looks_every_eighth_of_a_long_window() -> None:
    harness = PartialHarness(grace_s=80.0)
    harness.steps(40)
    assert harness.looks == [11.0, 21.0, 31.0]


def test_a_replica_that_no_other_waits_for_does_not_look() -> None:
    harness = PartialHarness()
    harness.lease.is_awaited = False
    harness.there = processes(0, 2)
    assert harness.steps(50) is None and not harness.looks
    harness.lease.is_awaited = True
    assert harness.steps(STEPS) == 51


def test_the_window_begins_when_others_begin_to_wait() -> None:
    harness = PartialHarness(grace_s=60.0)
    harness.lease.is_awaited = False
    harness.there = processes(0, 2)
    harness.steps(50)
    harness.lease.is_awaited = True
    assert harness.steps(STEPS) is None
    assert harness.looks == [52.0], "the rest of the steps fits into the window"


def test_the_first_round_ends_once_all_others_have_contributed() -> None:
    harness = PartialHarness()
    harness.partial.join(1, processes(0, 2))
    harness.there = processes(0)
    assert harness.steps(90) is None
    harness.there = processes(0, 2)
    assert harness.steps(STEPS) == 91, "the window is long enough for the rest"


def test_the_first_seconds_of_the_first_round_do_not_wait_for_a_waiting_replica() -> None:
    harness = PartialHarness()
    harness.lease.is_awaited = False
    harness.partial.join(1, processes(0, 2))
    harness.steps(60)
    assert harness.looks == [float(second) for second in range(2, 15)]


def test_a_group_that_starts_again_makes_whole_rounds() -> None:
    harness = PartialHarness(grace_s=1000.0, round_timeout_s=2000.0)
    harness.partial.join(1, processes(0, 2))
    harness.there = harness.running = processes(0, 2, incarnation="00002-bbbbbbbb")
    assert harness.steps(STEPS) is None
    assert harness.looks


def test_contributions_of_processes_that_ended_do_not_end_the_first_round() -> None:
    harness = PartialHarness()
    harness.partial.join(1, processes(0, 2))
    harness.there, harness.running = processes(0, 2), frozenset()
    assert harness.steps(50) is None and harness.looks
    harness.running = processes(2)
    assert harness.steps(STEPS) == 51


def test_later_rounds_wait_for_the_window() -> None:
    harness = PartialHarness(grace_s=60.0)
    harness.partial.join(0, processes(0, 2))
    harness.steps(50)
    harness.there = processes(0, 2)
    assert harness.steps(STEPS) is None


def test_an_unavailable_store_does_not_end_the_round() -> None:
    harness = PartialHarness()
    harness.error = StoreUnavailable("down")
    assert harness.steps(STEPS) is None and harness.looks


def test_a_listing_that_does_not_answer_delays_no_step_and_counts_later() -> None:
    harness = PartialHarness()
    harness.answers = False
    harness.there = processes(0, 2)
    assert harness.steps(50) is None and len(harness.hanging) == 1, "one listing at a time"
    harness.answer()
    assert harness.steps(STEPS) == 51


@pytest.mark.parametrize("overlap", [{}, {"overlap_steps": 200, "mixing_alpha": 1.0}])
def test_replicas_compute_while_the_store_does_not_answer(overlap: dict[str, Any]) -> None:
    """Each one assumes then that others wait for it."""
    harness = make_harness(
        sync_every=600,
        min_quorum=2,
        total_rounds=2,
        step_s=dict.fromkeys(range(3), 1.0),
        **overlap,
    )
    harness.scenario = replace(harness.scenario, denied_s=(650.0, 1100.0))
    made: list[list[int]] = []

    def count() -> None:
        for at_s in (650.0, 1100.0):
            harness.scheduler.sleep(1000 + at_s - harness.scheduler.now_s)
            made.append([len(life.steps) for life in harness.lives])

    harness.scheduler.spawn("count", count, Process("count"))
    with virtual(harness):
        harness.run()
    before, after = made
    assert len(before) == len(after) == 3
    assert all(450 >= n - m > 430 for m, n in zip(before, after, strict=True))


@pytest.mark.parametrize("off", ["setting", "earlier"])
def test_it_is_off_by_the_setting_and_where_an_earlier_process_has_contributed(off: str) -> None:
    harness = PartialHarness(**({"partial_rounds": "off"} if off == "setting" else {}))
    harness.earlier = object() if off == "earlier" else None
    harness.there = processes(0, 2)
    assert harness.steps(STEPS) is None and not harness.looks


@matrix(("partial", "missed"), [("off", 6), ("on", 0)], fast=[("on", 0)])
@pytest.mark.parametrize("overlap", [{}, {"overlap_steps": 2, "mixing_alpha": 1.0}])
def test_a_replica_of_a_third_of_the_speed_takes_part_in_every_round(
    partial: str, missed: int, overlap: dict[str, Any]
) -> None:
    """Without partial rounds it misses every round."""
    harness = make_harness(
        sync_every=60,
        min_quorum=2,
        grace_s=20.0,
        partial_rounds=partial,
        step_s={0: 1.0, 1: 1.0, 2: 3.0},
        **overlap,
    )
    run(harness)
    assert [life.reason for life in harness.lives] == ["completed"] * 3
    rounds = [harness.plan(round) for round in range(1, 7)]
    absent = [round for round in rounds if 2 not in [c["replica"] for c in round["contributions"]]]
    assert len(absent) == missed
    steps = [c["steps"] for round in rounds for c in round["contributions"] if c["replica"] == 2]
    assert partial == "off" or all(0 < made < 60 for made in steps)


def test_a_short_round_whose_steps_the_round_before_discards_continues() -> None:
    """It ends while the exchange of the round before overlaps, which is late and keeps nothing."""
    harness = make_harness(
        replicas=2,
        sync_every=60,
        total_rounds=4,
        min_quorum=1,
        grace_s=2.0,
        overlap_steps=20,
        mixing_alpha=1.0,
        late_keep=0.0,
        step_s={0: 1.0, 1: 3.0},
    )
    run(harness)
    assert [(life.reason, life.error) for life in harness.lives] == [("completed", None)] * 2


def test_a_replica_that_reaches_the_window_makes_all_steps_of_a_long_round() -> None:
    harness = make_harness(
        sync_every=50, min_quorum=1, grace_s=60.0, step_s={0: 1.2, 1: 1.2, 2: 1.8}
    )
    run(harness)
    steps = [c["steps"] for round in range(1, 7) for c in harness.plan(round)["contributions"]]
    assert steps == [50] * 18


def restart(harness: Harness, replica: int, *, after_s: float, away_s: float) -> None:
    """Kill the process of a replica after ``after_s`` and start the next one ``away_s`` later."""

    def work() -> None:
        harness.scheduler.sleep(after_s)
        life = next(life for life in harness.lives if life.replica == replica)
        harness.scheduler.kill(life.process)
        harness.scheduler.sleep(away_s)
        harness.launch(replica)

    harness._look_after = lambda: None  # type: ignore[method-assign]
    harness.scheduler.spawn("restart", work, Process("restart"))


@pytest.mark.parametrize("quorum", [1, 3])
def test_a_group_that_is_killed_after_the_first_contribution_makes_whole_rounds(
    quorum: int,
) -> None:
    """Its first contribution is there when all start again, and the request for heartbeats."""
    harness = make_harness(
        sync_every=100,
        min_quorum=quorum,
        total_rounds=3,
        grace_s=40.0,
        step_s={0: 0.8, 1: 1.0, 2: 1.0},
    )

    def kill_all() -> None:
        while not harness.bucket.objects.keys() & {keys.awaited(2)}:
            harness.scheduler.sleep(1.0)
        for life in list(harness.lives):
            harness.scheduler.kill(life.process)
        for replica in range(3):
            harness.launch(replica)

    harness._look_after = lambda: None  # type: ignore[method-assign]
    harness.scheduler.spawn("kill all", kill_all, Process("kill all"))
    run(harness)
    made = [c["steps"] for round in (1, 2, 3) for c in harness.plan(round)["contributions"]]
    assert made == [100] * 9 and len(harness.lives) == 6


@matrix(("partial", "absent"), [("off", {2, 3, 4, 5}), ("on", set())], fast=[("on", set())])
def test_a_replica_that_returns_in_the_middle_of_a_long_round_takes_part(
    partial: str, absent: set[int]
) -> None:
    """Without partial rounds it misses each round by the same delay, less the grace window for
    which the others wait in vain."""
    harness = make_harness(
        sync_every=600,
        min_quorum=2,
        partial_rounds=partial,
        step_s=dict.fromkeys(range(3), 1.0),
    )
    restart(harness, 2, after_s=700.0, away_s=200.0)
    run(harness)
    contributors = {
        round: [c["replica"] for c in harness.plan(round)["contributions"]] for round in range(1, 7)
    }
    assert {round for round, present in contributors.items() if 2 not in present} == absent
    written_s = harness.bucket.written_s
    rounds_s = [
        written_s[keys.commit(round)] - written_s[keys.commit(round - 1)] for round in range(3, 7)
    ]
    assert (max(rounds_s) < 620) is (partial == "on")
