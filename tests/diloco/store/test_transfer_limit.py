"""The number of parts in flight comes near the best fixed one on simulated lines."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest

from diloco.store.base import PART_BYTES, StoreUnavailable
from diloco.store.transfer_limit import (
    FIRST,
    Stage,
    failed,
    first_state,
    in_equal_turns,
    observed,
)
from diloco.store.transfers import BACK_OFF_S, Flight, Line
from tests.diloco.clocks import ManualClock

MB = 1e6
MOST = 16


@dataclass(frozen=True)
class SimulatedLine:
    """A line with a latency before each part, a rate per connection and one for all of them."""

    latency_s: float
    connection: float
    total: float

    def rate(self, in_flight: int, part_bytes: int = PART_BYTES) -> float:
        """Bytes per second of parts in a steady state."""
        part_s = self.latency_s + part_bytes / self.connection
        return min(in_flight * part_bytes / part_s, self.total)

    def best(self, most: int = MOST) -> float:
        return max(self.rate(limit) for limit in range(1, most + 1))


LINES = {
    "cloud": SimulatedLine(0.06, 90 * MB, 10_000 * MB),
    "cloud with a full network card": SimulatedLine(0.06, 90 * MB, 700 * MB),
    "office": SimulatedLine(0.03, 50 * MB, 110 * MB),
    "one connection fills it": SimulatedLine(0.01, 900 * MB, 100 * MB),
    "far away": SimulatedLine(0.3, 20 * MB, 150 * MB),
}


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("name", list(LINES))
def test_the_limit_comes_near_the_best_fixed_number(name: str, noise: float) -> None:
    line, rng, state = LINES[name], random.Random(name), first_state(MOST)
    used: list[int] = []
    for _ in range(400):
        used.append(state.limit)
        state = observed(state, line.rate(state.limit) * rng.uniform(1 - noise, 1 + noise))
    mean = sum(line.rate(limit) for limit in used[40:]) / len(used[40:])
    assert mean >= 0.95 * line.best()
    assert min(used) >= 1 and max(used) <= MOST


def test_a_full_line_does_not_get_more_parts_than_fill_it() -> None:
    state = first_state(64)
    for _ in range(400):
        state = observed(state, LINES["one connection fills it"].rate(state.limit))
    assert state.chosen <= 2
    state = first_state(64)
    for _ in range(400):
        state = observed(state, LINES["cloud with a full network card"].rate(state.limit))
    assert 10 <= state.chosen <= 13  # ten and a half fill it


def test_a_line_that_becomes_wider_is_filled_again() -> None:
    line, state = LINES["office"], first_state(MOST)
    for _ in range(100):
        state = observed(state, line.rate(state.limit))
    assert state.chosen <= 4
    line = LINES["cloud"]
    for _ in range(200):
        state = observed(state, line.rate(state.limit))
    assert line.rate(state.chosen) >= 0.9 * line.best()


def test_doubling_ends_where_it_does_not_pay() -> None:
    line, state = LINES["cloud with a full network card"], first_state(64)
    limits = []
    while state.stage is Stage.DOUBLE:
        limits.append(state.limit)
        state = observed(state, line.rate(state.limit))
    assert limits == [4, 8, 16, 32] and state.limit == 16


def test_an_error_halves_the_limit_and_it_rises_again() -> None:
    line, state = LINES["cloud"], first_state(MOST)
    for _ in range(20):
        state = observed(state, line.rate(state.limit))
    before, state = state.limit, failed(state)
    assert state.limit == before // 2
    for _ in range(200):
        state = observed(state, line.rate(state.limit))
    assert state.chosen >= 0.9 * MOST
    assert failed(replace(state, limit=1)).limit == 1


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        first_state(0)


@pytest.mark.parametrize(
    ("limit", "parts", "in_flight"),
    [
        (16, 119, 17),  # seven turns instead of seven and a half
        (16, 50, 17),
        (16, 48, 16),
        (16, 40, 20),
        (16, 24, 24),  # all at once
        (16, 26, 16),  # all at once would be more than the largest limit
        (4, 9, 5),
        (24, 50, 24),
        (1, 3, 1),
        (2, 5, 3),
        (2, 35, 2),  # three in flight would be twelve turns instead of eighteen
        (16, 3, 16),
        (16, 0, 16),
    ],
)
def test_the_last_turn_of_an_object_has_as_many_parts_as_the_others(
    limit: int, parts: int, in_flight: int
) -> None:
    assert in_equal_turns(limit, parts, most=24) == in_flight


def test_turns_never_have_fewer_parts_than_the_limit() -> None:
    for limit in range(1, 25):
        for parts in range(200):
            assert limit <= in_equal_turns(limit, parts, most=24) <= 24


# -- lines: parts in transfer ------------------------------------------------------------------


def transfer(
    line: Line, clock: ManualClock, simulated: SimulatedLine, parts: int, part_bytes: int
) -> tuple[float, int]:
    """Move ``parts`` through ``line`` as a reader does; return its seconds and the most parts that
    were held."""
    begun_s, left, most = clock.now_s, parts, 0
    active: list[list[float]] = []  # the latency and the bytes that are left of each part
    flights: list[Flight] = []

    def begun() -> Flight | None:
        return line.begin(part_bytes, alone=not active, held=len(active), left=left)

    while left or active:
        while left and (flight := begun()):
            active.append([simulated.latency_s, float(part_bytes)])
            flights.append(flight)
            left -= 1
        most = max(most, len(active))
        moving = sum(latency <= 0 for latency, _ in active)
        rate = min(simulated.connection, simulated.total / moving) if moving else 0.0
        seconds = min(
            latency if latency > 0 else size_bytes / rate for latency, size_bytes in active
        )
        clock.sleep(seconds)
        for one in active:
            if one[0] > 0:
                one[0] = one[0] - seconds if one[0] - seconds > 1e-9 else 0.0
            else:
                one[1] -= rate * seconds
        for index in reversed(range(len(active))):
            if active[index][1] <= 1e-3:
                del active[index]
                line.end(flights.pop(index), complete=True)
                line.release(part_bytes)
    return clock.now_s - begun_s, most


def best_fixed(simulated: SimulatedLine, parts: int) -> float:
    """Return the seconds of the best fixed number of parts in flight."""

    def seconds(limit: int) -> float:
        clock = ManualClock()
        line = Line(clock=clock, most=MOST)
        line._state = replace(first_state(MOST), limit=limit)
        line._change = lambda state: None  # type: ignore[method-assign]
        return transfer(line, clock, simulated, parts, PART_BYTES)[0]

    return min(seconds(limit) for limit in range(1, MOST + 1))


@pytest.mark.parametrize("parts", [24, 50, 125])
@pytest.mark.parametrize("name", list(LINES))
def test_rounds_become_nearly_as_fast_as_the_best_fixed_number(name: str, parts: int) -> None:
    clock = ManualClock()
    line = Line(clock=clock, most=MOST)
    rounds = []
    for _ in range(40):
        rounds.append(transfer(line, clock, LINES[name], parts, PART_BYTES)[0])
        clock.sleep(100.0)  # computing between rounds is not measured
    late = sorted(rounds[10:])
    assert best_fixed(LINES[name], parts) >= 0.9 * late[len(late) // 2]
    assert line.limit == pytest.approx(line._state.chosen, abs=line._state.chosen // 4 + 1)


def test_the_parts_held_stay_within_the_budget() -> None:
    clock = ManualClock()
    line = Line(clock=clock, most=MOST, budget_bytes=5 * PART_BYTES)
    most = [transfer(line, clock, LINES["cloud"], 50, PART_BYTES)[1] for _ in range(20)]
    assert max(most) == 5 < line.limit
    held = [line.begin(PART_BYTES, alone=False) for _ in range(5)]
    ends = [flight for flight in held if flight]
    for flight in ends:
        line.end(flight, complete=True)  # read, and not yet taken
    assert line.begin(6 * PART_BYTES, alone=False) is None
    assert line.begin(6 * PART_BYTES, alone=True) is not None, "every reader makes progress"


def held(line: Line, limit: int) -> None:
    line._state = replace(first_state(line.most), limit=limit, chosen=limit, stage=Stage.HOLD)


def begun(line: Line, parts: int, **reader: int) -> int:
    """Begin parts until the line is full; return how many began."""
    return sum(line.begin(PART_BYTES, alone=False, **reader) is not None for _ in range(parts))


def test_the_last_parts_of_a_reader_that_has_the_line_alone_begin_together() -> None:
    line = Line(clock=ManualClock(), most=MOST)
    held(line, 8)
    assert begun(line, 8) == 8
    assert begun(line, 1, held=8, left=3) == 0, "eleven are more than five quarters of eight"
    assert begun(line, 1, held=7, left=2) == 0, "another reader holds a part"
    line._state = replace(line._state, stage=Stage.STEP)
    assert begun(line, 1, held=8, left=2) == 0, "a limit is tried"
    held(line, 8)
    assert begun(line, 1, held=8, left=2) == begun(line, 1, held=9, left=1) == 1
    line = Line(clock=ManualClock(), most=9)
    held(line, 8)
    assert begun(line, 8) == begun(line, 1, held=8, left=2) * 8
    assert begun(line, 1, held=9, left=1) == 0, "there are no more threads"


def test_parts_above_the_limit_do_not_make_it_look_faster() -> None:
    """Each reader has one part, whatever the limit."""
    clock = ManualClock()
    line = Line(clock=clock, most=MOST)
    flights = [line.begin(PART_BYTES, alone=True) for _ in range(2 * FIRST)]
    clock.sleep(1.0)
    for flight in flights:
        assert flight is not None
        line.end(flight, complete=True)
    assert line._state.rate == FIRST * PART_BYTES
    assert line.limit == 2 * FIRST


def test_parts_that_fail_are_not_measured_and_one_overload_counts_once() -> None:
    clock = ManualClock()
    line = Line(clock=clock, most=MOST)
    transfer(line, clock, LINES["cloud"], 200, PART_BYTES)
    before = line.limit
    for _ in range(5):
        line.back_off()
        clock.sleep(BACK_OFF_S / 10)
    assert line.limit == before // 2
    clock.sleep(BACK_OFF_S)
    line.back_off()
    assert line.limit == before // 4


# -- objects that a client divides itself --------------------------------------------------------


def upload(
    line: Line, clock: ManualClock, simulated: SimulatedLine, parts: int, *, known: bool = False
) -> int:
    """Upload one object in ``parts``, turn by turn; return how many were in flight."""
    with line.measured(parts if known else None) as stream:
        assert len(list(stream.counted([bytes(1000)] * parts))) == parts
        for first in range(0, parts, stream.limit):
            turn = min(stream.limit, parts - first)
            clock.sleep(turn * 1000 / simulated.rate(turn, 1000))
        return stream.limit


def test_uploads_double_until_the_line_is_full() -> None:
    clock, simulated = ManualClock(), SimulatedLine(0.06, 90 * MB, 12 * 1000 / 0.06)
    line = Line(clock=clock, most=64)
    limits = [upload(line, clock, simulated, 200) for _ in range(100)]
    assert limits[:4] == [4, 8, 16, 32]
    assert 10 <= line._state.chosen <= 16


@pytest.mark.parametrize("known", [False, True])
def test_objects_with_few_parts_leave_the_limit(known: bool) -> None:
    clock = ManualClock()
    line = Line(clock=clock, most=MOST)
    for _ in range(20):
        upload(line, clock, LINES["cloud"], 2, known=known)
    assert line.limit == FIRST


FULL_AT_12 = SimulatedLine(0.06, 90 * MB, 12 * 1000 / 0.06)


def test_objects_of_one_size_have_equal_turns_from_the_second_one_on() -> None:
    clock = ManualClock()
    line = Line(clock=clock, most=24)
    found = [(line.limit, upload(line, clock, FULL_AT_12, 50, known=True)) for _ in range(10)]
    assert found == [
        *[(4, 4), (8, 9), (16, 17), (24, 24)],
        *[(16, 17)] * 4,
        *[(20, 20)] * 2,
    ]


def test_objects_of_several_sizes_have_exactly_the_limit_where_it_is_measured() -> None:
    """In the last two observations before a step and in the step."""
    clock = ManualClock()
    line = Line(clock=clock, most=24)
    found = [
        (line.limit, upload(line, clock, FULL_AT_12, parts, known=True))
        for parts in (50, 50, 50, 50, 50, 40, 50, 40, 50, 40)
    ]
    assert found[4:] == [(16, 17), (16, 20), (16, 16), (16, 16), (20, 20), (20, 20)]


@pytest.mark.parametrize("parts", [13, 20, 45, 53])
def test_after_an_error_the_turns_become_as_few_as_before(parts: int) -> None:
    """A limit with as many turns is no faster, so a step to it would never pay."""

    def turns(errors: int) -> int:
        clock = ManualClock()
        line = Line(clock=clock, most=24)
        for _ in range(errors):
            line.back_off()
            clock.sleep(2 * BACK_OFF_S)
        found = [upload(line, clock, LINES["cloud"], parts, known=True) for _ in range(300)]
        return -(-parts // statistics.mode(found))

    assert turns(errors=1) == turns(errors=3) == turns(errors=0) == -(-parts // 24)


def test_a_step_is_compared_by_the_parts_in_flight() -> None:
    """Of 27 parts, limits of 10 and 15 have 14 and 15 in flight."""
    state = replace(first_state(24), stage=Stage.STEP, chosen=10, limit=15, parts=27, rate=100.0)
    for _ in range(2):
        assert state.in_flight(27) == 15
        state = observed(state, 102.0, parts=27, in_flight=15)
    assert state.chosen == 15


@pytest.mark.parametrize("each", [(50, 40), (20, 21), (12, 24), (24, 13, 30, 9)])
def test_after_an_error_a_limit_for_objects_of_several_sizes_rises_to_the_best_one(
    each: tuple[int, ...],
) -> None:
    """A step of a quarter has as many turns of some of them, and never pays."""
    clock = ManualClock()
    line = Line(clock=clock, most=24)
    line.back_off()
    for _ in range(150):
        for parts in each:
            upload(line, clock, LINES["cloud"], parts, known=True)
    assert line._state.chosen >= 21


def test_a_limit_that_was_found_for_several_sizes_rises_for_one() -> None:
    clock = ManualClock()
    line = Line(clock=clock, most=24)
    line.back_off()
    for parts in (9, 30, 17, 11) * 6:
        upload(line, clock, FULL_AT_12, parts, known=True)
    found = [upload(line, clock, LINES["cloud"], 23, known=True) for _ in range(300)]
    assert statistics.mode(found[-100:]) >= 23


def test_a_step_down_that_does_not_change_the_parts_in_flight_is_not_tried() -> None:
    """With limits from 9 to 18, seventeen parts go at once."""
    state = first_state(24)
    for limit in (4, 8, 16, 24):
        assert state.limit == limit
        state = observed(state, LINES["cloud"].rate(limit), parts=17, in_flight=limit)
    tried = set()
    for _ in range(100):
        tried.add(state.limit)
        in_flight = state.in_flight(17)
        rate = LINES["cloud"].rate(min(in_flight, 17))
        state = observed(state, rate, parts=17, in_flight=in_flight)
    assert tried == {24, 8}, "eight in flight are three turns"


def test_two_objects_do_not_have_equal_turns() -> None:
    clock = ManualClock()
    line = Line(clock=clock, most=24)
    for _ in range(4):
        upload(line, clock, FULL_AT_12, 50)
    assert line._state.stage is Stage.HOLD
    with ExitStack() as stack:
        with line.measured(50) as first:
            second = stack.enter_context(line.measured(50))
            assert (first.limit, second.limit) == (17, 1)
        with line.measured(50) as third:
            assert third.limit == 15, "the second one still has a part in flight"


def test_equal_turns_of_several_sizes_are_no_measurements() -> None:
    """Rates of other turns do not compare with those of a step."""
    clock = ManualClock()
    line = Line(clock=clock, most=24)
    while line._state.stage is not Stage.HOLD:
        upload(line, clock, FULL_AT_12, 50, known=True)
    assert upload(line, clock, FULL_AT_12, 50, known=True) == 17
    assert line._state.rate > 0
    assert upload(line, clock, FULL_AT_12, 40, known=True) == 20
    assert line._state.rate == 0
    rates = []
    for parts in (50, 40):
        upload(line, clock, FULL_AT_12, parts, known=True)
        rates.append(line._state.rate)
    assert line._state.stage is Stage.STEP and rates[0] != rates[1] > 0


def test_objects_much_smaller_than_others_are_not_measured() -> None:
    """As in a sharded round: a payload, and two shards."""
    clock = ManualClock()
    line = Line(clock=clock, most=24)
    found = [
        (line.limit, upload(line, clock, FULL_AT_12, parts, known=True))
        for _ in range(8)
        for parts in (50, 24, 13)
    ]
    assert found[::3] == [(4, 4), (8, 9), (16, 17), (24, 24), *[(16, 17)] * 4]
    assert found[12:-2] == [(16, 17), (16, 24), (16, 16)] * 3 + [(16, 17)]


def test_small_objects_are_measured_once_there_are_no_others() -> None:
    clock = ManualClock()
    line = Line(clock=clock, most=24)
    while line._state.stage is not Stage.HOLD:
        upload(line, clock, FULL_AT_12, 50, known=True)
    slower = replace(FULL_AT_12, total=FULL_AT_12.total / 4)
    states = []
    for _ in range(50):
        upload(line, clock, slower, 20, known=True)
        states.append(line._state)
    assert {state.rate for state in states[:8]} == {states[0].rate}
    assert states[8].rate < states[7].rate
    assert states[-1].chosen < 16


def test_the_rate_of_another_size_is_forgotten() -> None:
    state = first_state(24)
    while state.stage is not Stage.HOLD:
        state = observed(state, LINES["office"].rate(state.limit))
    state = observed(state, 1.0, parts=50, in_flight=state.in_flight(50))
    assert state.rate == 1.0, "the rates until now were of objects of unknown size"
    state = observed(state, 2.0, parts=50, in_flight=state.in_flight(50))
    assert 1.0 < state.rate < 2.0
    state = observed(state, 3.0, parts=40, in_flight=state.limit)
    assert state.rate == 3.0


def test_two_uploads_share_the_limit_and_are_not_measured() -> None:
    clock = ManualClock()
    line = Line(clock=clock, most=MOST)

    def both() -> Iterator[int]:
        with line.measured() as first, line.measured() as second:
            for stream in (first, second):
                list(stream.counted([b"x"] * 50))
                yield stream.limit
            clock.sleep(1.0)

    assert list(both()) == [FIRST, 1]
    assert line.limit == FIRST
    upload(line, clock, LINES["cloud"], 50)
    assert line.limit == 2 * FIRST


def test_an_upload_that_the_store_refuses_halves_the_limit() -> None:
    line = Line(clock=ManualClock(), most=MOST)
    with pytest.raises(StoreUnavailable), line.measured():
        raise StoreUnavailable("SlowDown")
    assert line.limit == FIRST // 2
    with pytest.raises(KeyError), line.measured():
        raise KeyError
    assert line.limit == FIRST // 2, "an error of the caller is not one of the line"
