"""A replica too slow for the grace window contributes the steps it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from diloco.exchange.timings import Timings
from diloco.protocol.settings import GroupSettings
from diloco.store.base import StoreUnavailable
from diloco.training.partial_round import PartialRounds
from tests.diloco.model.test_scenarios import make_harness, run

STEPS = 100


class PartialHarness:
    """A replica of one step a second in a round of 100 steps; looks every three seconds."""

    def __init__(self, **changes: Any) -> None:
        chosen = {"partial_rounds": "on", "min_quorum": 2, "grace_s": 20.0, **changes}
        self.now_s = 0.0
        self.looks: list[float] = []
        self.there: frozenset[int] = frozenset()
        self.error: Exception | None = None
        self.counter = SimpleNamespace(steps_in_round=0, compute_in_round_s=0.0)
        self.earlier: object = None
        progress: Any = SimpleNamespace(
            settings=GroupSettings(**chosen),
            counter=self.counter,
            earlier_contributor=lambda round: self.earlier,
        )
        observer: Any = SimpleNamespace(contributors=self._contributors)
        clock: Any = SimpleNamespace(monotonic=lambda: self.now_s)
        self.partial = PartialRounds(progress, observer, clock)

    def _contributors(self, round: int) -> frozenset[int]:
        self.looks.append(self.now_s)
        if self.error:
            raise self.error
        return self.there

    def steps(self, until: int) -> int | None:
        """Make steps up to ``until``; return the step at which the round must end."""
        while self.counter.steps_in_round < until:
            self.now_s += 1
            self.counter.steps_in_round += 1
            self.counter.compute_in_round_s += 1.0
            if self.partial.must_end(1, steps=STEPS):
                return int(self.counter.steps_in_round)
        return None


def test_the_round_ends_once_the_quorum_is_seen_and_the_window_is_too_short() -> None:
    harness = PartialHarness()
    harness.there = frozenset({0})
    assert harness.steps(30) is None, "no quorum yet"
    harness.there = frozenset({0, 2})
    assert harness.steps(STEPS) == 31


def test_a_replica_that_can_finish_within_the_window_makes_all_steps() -> None:
    harness = PartialHarness(grace_s=60.0)
    harness.steps(50)
    harness.there = frozenset({0, 2})
    assert harness.steps(STEPS) is None


def test_the_upload_must_fit_into_the_window_too() -> None:
    harness = PartialHarness(grace_s=60.0)
    timings = Timings(SimpleNamespace())  # type: ignore[arg-type]
    timings.seconds |= {"encode": 5.0, "upload": 15.0, "wait": 100.0}
    harness.partial.contributed(timings)
    harness.steps(50)
    harness.there = frozenset({0, 2})
    assert harness.steps(STEPS) == 52


def test_it_looks_every_fifth_of_the_heartbeat_timeout_until_the_quorum_is_there() -> None:
    harness = PartialHarness(grace_s=1000.0, round_timeout_s=2000.0)
    harness.steps(10)
    assert harness.looks == [4.0, 7.0, 10.0]
    harness.there = frozenset({0, 2})
    harness.steps(STEPS)
    assert harness.looks == [4.0, 7.0, 10.0, 13.0]


def test_an_unavailable_store_does_not_end_the_round() -> None:
    harness = PartialHarness()
    harness.error = StoreUnavailable("down")
    assert harness.steps(STEPS) is None and harness.looks


@pytest.mark.parametrize("off", ["setting", "earlier"])
def test_it_is_off_by_default_and_where_an_earlier_process_has_contributed(off: str) -> None:
    harness = PartialHarness(**({"partial_rounds": "off"} if off == "setting" else {}))
    harness.earlier = object() if off == "earlier" else None
    harness.there = frozenset({0, 2})
    assert harness.steps(STEPS) is None and not harness.looks


@pytest.mark.parametrize(("partial", "missed"), [("off", 6), ("on", 0)])
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
