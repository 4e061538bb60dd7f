"""Reads ahead: in order, bounded, and nothing left behind when one fails or nobody reads on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.protocol.parallel_reads import Range, read_each, read_parts
from diloco.protocol.records import BadRecord, Command
from diloco.store.base import LocalStore, MissingKey


class Watched(LocalStore):
    """Counts reads begun; those of parts named in ``held`` wait until they are let go."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun = 0
        self.held: dict[int, threading.Event] = {}
        self._lock = threading.Lock()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._lock:
            self.begun += 1
        if start in self.held:
            assert self.held[start].wait(30)
        return super().get_range(key, start, length)


@pytest.fixture
def store(tmp_path: Path) -> Watched:
    store = Watched(tmp_path)
    store.put("a", bytes(range(100)))
    return store


def ranges(count: int) -> list[Range]:
    return [("a", 10 * index, 10) for index in range(count)]


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("read_parts")]


@pytest.mark.parametrize("in_flight", [1, 3, 20])
def test_parts_come_in_the_order_asked_for(store: Watched, in_flight: int) -> None:
    backwards = ranges(10)[::-1]
    found = list(read_parts(store, backwards, in_flight=in_flight))
    assert b"".join(found[::-1]) == bytes(range(100))
    assert list(read_parts(store, [])) == []
    assert readers() == []


def test_a_slow_first_part_is_waited_for_while_the_next_are_read(store: Watched) -> None:
    store.held[0] = threading.Event()
    threading.Timer(0.05, store.held[0].set).start()
    assert b"".join(read_parts(store, ranges(10), in_flight=4)) == bytes(range(100))


def test_no_more_is_asked_for_than_may_be_in_memory(store: Watched) -> None:
    asked = 0

    def requests() -> Iterator[Range]:
        nonlocal asked
        for request in ranges(10):
            asked += 1
            yield request

    parts = read_parts(store, requests(), in_flight=3)
    for used in range(1, 7):
        next(parts)
        assert asked == used + 3
    parts.close()  # type: ignore[attr-defined]
    assert store.begun <= 6 + 3
    assert readers() == []


def test_a_failure_comes_after_the_parts_before_it_and_ends_the_threads(store: Watched) -> None:
    asked = [*ranges(3), ("gone", 0, 1), *ranges(10)]
    parts = read_parts(store, asked, in_flight=2)
    assert [next(parts)[0] for _ in range(3)] == [0, 10, 20]
    with pytest.raises(MissingKey, match="gone"):
        next(parts)
    assert readers() == []
    assert store.begun < len(asked) - 1


def test_nothing_in_flight_is_refused(store: Watched) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        next(read_parts(store, ranges(1), in_flight=0))


def command(n: int) -> Command:
    return Command(n=n, command="stop", wall_s=1.0)


def test_records_are_read_side_by_side_and_missing_ones_left_out(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    names = [f"records/{n}" for n in range(20)]
    for n, name in enumerate(names[:15]):
        store.put(name, command(n).to_bytes())
    expected = {name: command(n) for n, name in enumerate(names[:15])}
    assert read_each(store, Command, names) == expected
    assert read_each(store, Command, []) == {}
    assert list(read_each(store, Command, names[:1])) == names[:1]


def test_an_object_that_is_no_record_is_its_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("good", command(1).to_bytes())
    store.put("bad", b"{")
    store.put("large", b"0" * (Command.LIMIT + 1))
    found = read_each(store, Command, ["good", "bad", "large"])
    assert found["good"] == command(1)
    assert isinstance(found["bad"], BadRecord)
    assert "at most" in str(found["large"])
