"""Ranges of objects that are expected: polled, read ahead, and handed over or dropped."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from diloco.clock import SystemClock
from diloco.protocol.parallel_reads import ExpectedReads, Range
from diloco.store.base import LocalStore, MissingKey
from diloco.store.transfers import Line

RANGES: list[Range] = [(key, start, 10) for start in range(0, 100, 10) for key in ("a", "b")]


WHOLE: list[Range] = [("a", 0, 100), ("b", 0, 100)]


class Counted(LocalStore):
    """Counts the reads of each kind."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.changed = threading.Condition()
        self.polls = self.missed = self.read = 0
        self.may_read: threading.Event | None = None
        """Reads of b from 0 on wait for it."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        missed = False
        try:
            if self.may_read is not None and (key, start) == ("b", 0):
                assert self.may_read.wait(60)
            return super().get_range(key, start, length)
        except MissingKey:
            missed = True
            raise
        finally:
            with self.changed:
                self.polls += length == 1
                self.read += length != 1
                self.missed += missed
                self.changed.notify_all()

    def wait(self, **counts: int) -> None:
        with self.changed:
            reached = self.changed.wait_for(
                lambda: all(getattr(self, name) >= count for name, count in counts.items()), 300
            )
        assert reached


@pytest.fixture
def store(tmp_path: Path) -> Counted:
    return Counted(tmp_path)


def expect(
    store: Counted,
    line: Line | None = None,
    polls: int = 8,
    requests: Sequence[Range] = RANGES,
) -> ExpectedReads:
    clock = SystemClock()
    return ExpectedReads(store, requests, clock=clock, polls=polls, line=line or Line(clock=clock))


def put(store: Counted, *keys: str) -> None:
    for key in keys:
        store.put(key, bytes(range(100)))


def expected() -> bytes:
    return b"".join(bytes(range(start, start + 10)) for _, start, _ in RANGES)


def test_objects_that_are_there_are_read_before_they_are_required(store: Counted) -> None:
    put(store, "a", "b")
    reads = expect(store)
    store.wait(read=4)
    parts = reads.parts_of(RANGES)
    assert parts is not None
    assert b"".join(parts) == expected()
    assert (store.polls, store.missed, store.read) == (2, 0, len(RANGES))


@pytest.mark.parametrize(("budget_bytes", "polls"), [(200, 0), (5, 2)])
def test_a_poll_reads_the_only_range_of_an_object_unless_the_line_is_full(
    store: Counted, budget_bytes: int, polls: int
) -> None:
    put(store, "a", "b")
    line = Line(clock=SystemClock(), budget_bytes=budget_bytes)
    reads = expect(store, line, requests=WHOLE)
    store.wait(polls=polls, read=2 - polls)
    parts = reads.parts_of(WHOLE)
    assert parts is not None
    assert list(parts) == 2 * [bytes(range(100))]
    assert (store.polls, store.read) == (polls, 2)
    assert (line._in_flight, line._held, line._held_bytes) == (0, 0, 0)


def test_a_range_that_a_poll_reads_when_it_is_required_is_read_once(store: Counted) -> None:
    put(store, "a", "b")
    store.may_read = threading.Event()
    reads = expect(store, requests=WHOLE)
    store.wait(read=1)
    parts = reads.parts_of(WHOLE)
    assert parts is not None
    next(parts)
    store.may_read.set()
    assert list(parts) == [bytes(range(100))]
    assert (store.polls, store.read) == (0, 2)


def test_reads_that_polls_have_made_are_dropped_with_the_others(store: Counted) -> None:
    put(store, "a", "b")
    line = Line(clock=SystemClock())
    reads = expect(store, line, requests=[*WHOLE, ("c", 0, 10)])
    store.wait(read=2)
    reads.close()
    assert (line._in_flight, line._held, line._held_bytes) == (0, 0, 0)


def test_an_object_that_appears_later_is_found_by_a_poll(store: Counted) -> None:
    put(store, "a")
    reads = expect(store, polls=1_000_000)
    store.wait(missed=1)
    put(store, "b")
    store.wait(read=4)
    parts = reads.parts_of(RANGES)
    assert parts is not None
    assert b"".join(parts) == expected()


def test_polls_in_vain_are_few_and_the_rest_is_read_when_it_is_required(store: Counted) -> None:
    put(store, "a")
    reads = expect(store, polls=3)
    store.wait(missed=2)  # a poll of the other object can have taken the third
    put(store, "b")
    parts = reads.parts_of(RANGES)
    assert parts is not None
    assert b"".join(parts) == expected()
    assert 2 <= store.missed <= 3


def test_a_missing_object_is_an_error_once_it_is_required(store: Counted) -> None:
    put(store, "a")
    parts = expect(store).parts_of(RANGES)
    assert parts is not None
    assert next(parts) == bytes(range(10))
    with pytest.raises(MissingKey):
        next(parts)


@pytest.mark.parametrize("taken", [RANGES[:3], [*RANGES[:3], ("c", 0, 10)]])
def test_other_ranges_than_the_expected_ones_end_the_reads(
    store: Counted, taken: list[Range]
) -> None:
    put(store, "a", "b")
    line = Line(clock=SystemClock())
    reads = expect(store, line)
    store.wait(read=1)
    assert reads.parts_of(taken) is None
    assert reads.parts_of(RANGES) is None
    assert (line._in_flight, line._held, line._held_bytes) == (0, 0, 0)


def test_closed_reads_return_their_memory_and_threads_even_if_a_reader_took_some(
    store: Counted,
) -> None:
    put(store, "a", "b")
    line = Line(clock=SystemClock())
    reads = expect(store, line)
    parts = reads.parts_of(RANGES)
    assert parts is not None
    next(parts)
    reads.close()
    reads.close()
    assert (line._in_flight, line._held, line._held_bytes) == (0, 0, 0)
    assert not [one for one in threading.enumerate() if one.name == "read_parts"]
