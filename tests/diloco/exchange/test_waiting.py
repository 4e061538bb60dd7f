"""Which processes list, and when the others poll."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.exchange.waiting import ExpectedWait, Stage, Turn, patience_s
from diloco.membership.observer import Observer
from diloco.protocol import keys
from diloco.protocol.records import Heartbeat, Identity
from diloco.store.base import LocalStore
from tests.diloco.clocks import ManualClock

TIMEOUT_S = 10.0
ROUND = 5


def process(replica: int) -> Identity:
    return Identity(replica=replica, incarnation="00001-00000000")


PROCESSES = [process(replica) for replica in range(12)]


class Group:
    """Leases that a test changes, and the turns of the processes."""

    def __init__(self, root: Path) -> None:
        self.store, self.clock, self.counts = LocalStore(root), ManualClock(), [0] * 12

    def beat(self, *replicas: int, round: int = ROUND, state: str = "waiting") -> None:
        for replica in replicas:
            self.counts[replica] += 1
            beat = Heartbeat(
                replica=replica,
                incarnation="00001-00000000",
                count=self.counts[replica],
                interval_s=2.0,
                state=state,
                round=round,
                step=0,
                tokens=0,
                started_wall_s=0.0,
                wall_s=0.0,
            )
            self.store.put(keys.beat(replica, beat.incarnation), beat.to_bytes())

    def turn(self, replica: int) -> Turn:
        observer = Observer(self.store, clock=self.clock, timeout_s=TIMEOUT_S)
        return Turn(
            observer, PROCESSES, process(replica), ROUND, clock=self.clock, timeout_s=TIMEOUT_S
        )

    def pass_timeouts(self, turn: Turn, number: int, *alive: int) -> None:
        for _ in range(number):
            self.clock.sleep(TIMEOUT_S)
            self.beat(*alive)
            turn.check()


@pytest.fixture
def group(tmp_path: Path) -> Group:
    return Group(tmp_path)


def test_the_first_two_list_at_once(group: Group) -> None:
    assert [group.turn(replica).is_due for replica in range(4)] == [True, True, False, False]


def test_a_process_outside_the_list_comes_last(group: Group) -> None:
    turn = group.turn(50)
    assert not turn.is_due
    assert turn.group == 3


def test_no_other_process_lists_while_one_of_the_first_two_is_alive(group: Group) -> None:
    group.beat(0, 1)
    turn = group.turn(2)
    group.pass_timeouts(turn, 5, 1)
    assert not turn.is_due


def test_the_next_two_take_over_when_the_first_two_are_gone(group: Group) -> None:
    group.beat(0, 1, 2, 3)
    third, fifth = group.turn(2), group.turn(4)
    for _ in range(3):
        group.clock.sleep(TIMEOUT_S)
        group.beat(2, 3)
        third.check()
        fifth.check()
    assert third.is_due
    assert not fifth.is_due


def test_any_survivor_lists_in_the_end(group: Group) -> None:
    group.beat(*range(11))
    turn = group.turn(11)
    group.pass_timeouts(turn, 6)
    assert turn.is_due


def test_a_candidate_that_still_computes_does_not_list(group: Group) -> None:
    group.beat(0, round=ROUND, state="computing")
    group.beat(1, round=ROUND - 1, state="waiting")
    turn = group.turn(2)
    group.clock.sleep(TIMEOUT_S)
    assert turn.check()
    assert turn.is_due


def test_a_turn_ends_when_an_earlier_candidate_arrives(group: Group) -> None:
    turn = group.turn(2)
    group.pass_timeouts(turn, 1)
    assert turn.is_due
    group.pass_timeouts(turn, 1, 0)
    assert not turn.is_due


def test_leases_are_read_once_per_timeout(group: Group) -> None:
    group.beat(0, 1)
    turn = group.turn(2)
    group.clock.sleep(TIMEOUT_S)
    assert turn.check()
    assert not turn.check()


def test_others_look_at_doubling_times_although_the_first_are_alive(group: Group) -> None:
    """Their main threads can hang while their leases are renewed."""
    stage = Stage(group.turn(2), ExpectedWait(), began_s=100.0, patience_s=30.0)
    looks = [t for t in range(100, 400, 10) if stage.lists(float(t))]
    assert looks == [130, 160, 220, 340]


@pytest.mark.parametrize(("grace_s", "round_timeout_s"), [(30.0, 600.0), (300.0, 600.0)])
def test_a_long_grace_window_is_over_before_the_round_times_out(
    group: Group, grace_s: float, round_timeout_s: float
) -> None:
    """The first two hang while they beat: the third sees the quorum when it looks first, and plans
    when the window that begins then is over."""
    longest_s = patience_s(
        grace_s=grace_s, heartbeat_timeout_s=15.0, round_timeout_s=round_timeout_s
    )
    stage = Stage(group.turn(2), ExpectedWait(), began_s=0.0, patience_s=longest_s)
    looks: list[float] = []
    for now_s in range(int(round_timeout_s) - 30):
        if stage.lists(now_s):
            looks.append(now_s)
            if now_s < looks[0] + grace_s:
                stage.act_at(looks[0] + grace_s)
    assert looks[0] + grace_s in looks


def test_the_second_process_leaves_two_seconds_to_the_first(group: Group) -> None:
    first, second = (
        Stage(group.turn(place), ExpectedWait(), began_s=100.0, patience_s=30.0) for place in (0, 1)
    )
    assert first.lists(100.0)
    assert not second.lists(101.9)
    assert second.lists(102.0)


def test_polls_are_frequent_around_the_expected_time() -> None:
    expected = ExpectedWait()
    for seconds in (32.0, 32.0, 500.0):
        expected.add(seconds)
    pauses = {waited_s: expected.pause_s(waited_s) for waited_s in (0.0, 28.0, 31.9, 33.0, 47.0)}
    assert pauses == pytest.approx({0.0: 16.0, 28.0: 3.0, 31.9: 1.0, 33.0: 1.0, 47.0: 5.0})


@pytest.mark.parametrize(("last_s", "expected_s"), [((24, 31, 30), 30), ((15, 31, 30), 15)])
def test_the_median_of_similar_waits_is_expected(
    last_s: tuple[float, ...], expected_s: float
) -> None:
    """A wait that a long pause has hidden is remembered as too short by half of the pause."""
    expected = ExpectedWait()
    for seconds in last_s:
        expected.add(seconds)
    assert expected.pause_s(expected_s - 8.0) == 6.0


def test_a_wait_of_30_seconds_takes_few_polls() -> None:
    expected = ExpectedWait()
    expected.add(30.0)
    waited_s, polls = 0.0, 0
    while waited_s < 30.0:
        waited_s += expected.pause_s(waited_s)
        polls += 1
    assert polls <= 5
    assert waited_s < 31.0


def test_a_process_that_lists_acts_at_the_end_of_the_grace_window(group: Group) -> None:
    stage = Stage(group.turn(0), ExpectedWait(), began_s=0.0, patience_s=30.0)
    assert stage.pause_s(20.0, until_s=20.25, lists=True) == 0.25
    assert stage.pause_s(20.0, until_s=float("inf"), lists=True) == TIMEOUT_S / 5
