"""Parallel reads: ordered, bounded, and without leftover threads after a failure or an early
end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from diloco.clock import SystemClock
from diloco.protocol.parallel_reads import ExpectedReads, Range, read_each, read_parts
from diloco.protocol.records import BadRecord, Command
from diloco.store.base import LocalStore, MissingKey, StoreUnavailable
from diloco.store.transfer_limit import Stage
from diloco.store.transfers import Line


@dataclass(frozen=True)
class Reads:
    """A number of reads that have begun, as an event."""

    condition: threading.Condition
    is_reached: Callable[[], bool]

    def wait(self, timeout_s: float) -> bool:
        with self.condition:
            return self.condition.wait_for(self.is_reached, timeout_s)


class Watched(LocalStore):
    """Counts started reads; reads of parts named in ``held`` block until they are released."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun = 0
        self.keys: list[str] = []
        self.held: dict[int, threading.Event | Reads] = {}
        self._begins = threading.Condition()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._begins:
            self.begun += 1
            self.keys.append(key)
            self._begins.notify_all()
        if start in self.held:
            assert self.held[start].wait(300)
        return super().get_range(key, start, length)

    def reached(self, begun: int) -> Reads:
        """Return an event that is set when ``begun`` reads have begun."""
        return Reads(self._begins, lambda: self.begun >= begun)


@pytest.fixture
def store(tmp_path: Path) -> Watched:
    store = Watched(tmp_path)
    store.put("a", bytes(range(100)))
    return store


def ranges(count: int) -> list[Range]:
    return [("a", 10 * index, 10) for index in range(count)]


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("read_parts")]


def line_of(limit: int, *, budget_bytes: int = 1000) -> Line:
    return Line(clock=SystemClock(), most=limit, budget_bytes=budget_bytes)


def test_the_last_parts_are_read_together(store: Watched) -> None:
    line = Line(clock=SystemClock(), most=20)
    line._state = replace(line._state, stage=Stage.HOLD)
    store.held = dict.fromkeys(range(0, 50, 10), store.reached(5))
    assert line.limit == 4
    assert len(list(read_parts(store, ranges(5), line=line))) == 5


@pytest.mark.parametrize("limit", [1, 3, 20])
def test_parts_arrive_in_the_requested_order(store: Watched, limit: int) -> None:
    backwards = ranges(10)[::-1]
    result = list(read_parts(store, backwards, line=line_of(limit)))
    assert b"".join(result[::-1]) == bytes(range(100))
    assert list(read_parts(store, [])) == []
    assert readers() == []


def test_later_parts_are_read_while_the_first_is_slow(store: Watched) -> None:
    """The first read ends only after five others have begun, although four are in flight."""
    store.held[0] = store.reached(6)
    assert b"".join(read_parts(store, ranges(10), line=line_of(4))) == bytes(range(100))


def test_parts_beyond_the_limit_or_the_budget_are_not_requested(store: Watched) -> None:
    for limit, budget_bytes, ahead in ((3, 1000, 3), (8, 40, 4), (8, 5, 1)):
        store.begun = 0
        store.held = {10 * index: threading.Event() for index in range(1, 10)}
        parts = read_parts(store, ranges(10), line=line_of(limit, budget_bytes=budget_bytes))
        first = threading.Thread(target=next, args=(parts,))
        first.start()
        first.join(300)
        assert not first.is_alive()
        store.reached(ahead + 1).wait(300)
        assert store.begun == 1 + ahead, "one was taken"
        for event in store.held.values():
            event.set()
        parts.close()  # type: ignore[attr-defined]
        assert store.begun <= 1 + ahead
        assert readers() == []


def test_a_line_is_empty_after_every_end(store: Watched) -> None:
    line = line_of(4, budget_bytes=40)
    list(read_parts(store, ranges(10), line=line))
    parts = read_parts(store, ranges(10), line=line)
    next(parts)
    parts.close()  # type: ignore[attr-defined]
    with pytest.raises(MissingKey):
        list(read_parts(store, [*ranges(3), ("gone", 0, 1), *ranges(9)], line=line))
    assert (line._in_flight, line._held_bytes) == (0, 0)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_reader_that_ends_leaves_the_line_to_another_one(store: Watched, is_read: bool) -> None:
    line, clock = line_of(4), SystemClock()
    store.held = {10 * index: threading.Event() for index in range(10)}
    first = ExpectedReads(store, ranges(3), clock=clock, polls=None, line=line)
    second = ExpectedReads(store, ranges(6)[3:], clock=clock, polls=None, line=line)
    assert store.reached(4).wait(300), "three of the first reader and one of the second"
    for index in range(3):
        store.held[10 * index].set()
    if not is_read:
        first.close()
    assert store.reached(6).wait(300), "the second reader has taken no part yet"
    for event in store.held.values():
        event.set()
    parts = second.parts_of(ranges(6)[3:])
    assert parts is not None
    assert b"".join(parts) == bytes(range(30, 60))
    first.close()
    assert (line._in_flight, line._held_bytes, line._refused) == (0, 0, {})


def test_expected_parts_leave_memory_to_a_reader_that_needs_its_own(store: Watched) -> None:
    line = line_of(4, budget_bytes=50)
    store.put("b", bytes(range(100)))
    expected = ExpectedReads(store, ranges(10), clock=SystemClock(), polls=None, line=line)
    assert store.reached(3).wait(300), "three quarters of the memory"
    store.held = {0: threading.Event()}
    parts = read_parts(store, [("b", 10 * index, 10) for index in range(10)], line=line)
    first = threading.Thread(target=next, args=(parts,))
    first.start()
    both = Reads(store._begins, lambda: store.keys.count("b") == 2)
    assert both.wait(300), "the second part does not wait until the first one is taken"
    assert store.keys.count("a") == 3
    store.held[0].set()
    first.join(300)
    assert b"".join(parts) == bytes(range(10, 100))
    taken = expected.parts_of(ranges(10))
    assert taken is not None
    assert b"".join(taken) == bytes(range(100))
    assert (line._in_flight, line._held_bytes, line._refused) == (0, 0, {})


def test_room_that_a_reader_returns_is_offered_again() -> None:
    """The system has started no thread for the part of the first reader."""
    line, called = line_of(1), []

    def first() -> bool:
        flight = line.begin(1, alone=False)
        assert flight is not None
        assert line.begin(1, alone=False, retry=second) is None
        line.end(flight, complete=False)
        line.release(1)
        return True

    def second() -> bool:
        called.append("second")
        return False

    flight = line.begin(1, alone=False)
    assert flight is not None
    assert line.begin(1, alone=False, retry=first) is None
    line.end(flight, complete=False)
    line.release(1)
    line.offer_room()
    assert called == ["second"]


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_reads_continue_if_the_system_starts_no_more_threads(
    store: Watched,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    threads: int,
) -> None:
    """Every slot of the line is returned."""
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("read_parts"):
            if len(started) == threads:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    line = line_of(4)
    assert b"".join(read_parts(store, ranges(10), line=line)) == bytes(range(100))
    assert (line._in_flight, line._held, line._held_bytes) == (0, 0, 0)
    assert store.begun == 10, "no part is read twice"
    assert caplog.text.count("fewer parts are read at once: can't start new thread") == 1
    with pytest.raises(MissingKey):
        list(read_parts(store, [*ranges(3), ("gone", 0, 1), *ranges(9)], line=line))
    assert (line._in_flight, line._held, line._held_bytes) == (0, 0, 0)
    assert readers() == []


def test_a_failure_is_raised_after_earlier_parts_and_ends_the_threads(store: Watched) -> None:
    requested = [*ranges(3), ("gone", 0, 1), *ranges(10), *ranges(10)]
    parts = read_parts(store, requested, line=line_of(2, budget_bytes=40))
    assert [next(parts)[0] for _ in range(3)] == [0, 10, 20]
    with pytest.raises(MissingKey, match="gone"):
        next(parts)
    assert readers() == []
    assert store.begun < len(requested) - 1


def test_an_unavailable_store_halves_the_limit(
    store: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(key: str, start: int, length: int) -> bytes:
        raise StoreUnavailable("SlowDown")

    monkeypatch.setattr(store, "get_range", refuse)
    line = line_of(4)
    with pytest.raises(StoreUnavailable):
        list(read_parts(store, ranges(10), line=line))
    assert line.limit == 2


def command(n: int) -> Command:
    return Command(n=n, command="stop", wall_s=1.0)


def test_records_are_read_in_parallel_and_missing_ones_omitted(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    names = [f"records/{n}" for n in range(20)]
    for n, name in enumerate(names[:15]):
        store.put(name, command(n).to_bytes())
    expected = {name: command(n) for n, name in enumerate(names[:15])}
    assert read_each(store, Command, names) == expected
    assert read_each(store, Command, []) == {}
    assert list(read_each(store, Command, names[:1])) == names[:1]


def test_an_invalid_record_is_returned_as_its_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("good", command(1).to_bytes())
    store.put("bad", b"{")
    store.put("large", b"0" * (Command.LIMIT + 1))
    result = read_each(store, Command, ["good", "bad", "large"])
    assert result["good"] == command(1)
    assert isinstance(result["bad"], BadRecord)
    assert "at most" in str(result["large"])
