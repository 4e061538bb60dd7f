"""Lines of a Modal log, for any split into entries."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executors.base import LogLine
from executors.modal.logs import EPOCH, Entry, Position, lines


def entry(micros: int, text: str, source: str = "stdout") -> Entry:
    return Entry(when=EPOCH + timedelta(microseconds=micros), source=source, text=text)


def read(entries: list[Entry], after: str = "", *, ended: bool = True) -> list[LogLine]:
    """Read like the executor: Modal's entries from a time on."""
    reached = Position.read(after) if after else Position()
    return list(
        lines((e for e in entries if e.micros >= reached.micros - 1000), reached, ended=ended)
    )


def texts(lines: list[LogLine]) -> list[str]:
    return [line.text for line in lines]


def test_an_entry_is_not_a_line() -> None:
    entries = [entry(5, "on"), entry(5, "e\ntwo\nth"), entry(9, "ree\n"), entry(9, "\nfour")]
    assert texts(read(entries)) == ["one", "two", "three", "", "four"]


def test_the_beginning_of_a_line_waits_for_its_end() -> None:
    entries = [entry(5, "one\ntw")]
    (one,) = read(entries, ended=False)
    assert one.text == "one"
    assert read(entries, one.position, ended=False) == []
    assert texts(read([*entries, entry(6, "o\n")], one.position)) == ["two"]
    assert texts(read(entries, one.position)) == ["tw"]


def test_another_source_ends_a_line() -> None:
    entries = [entry(1, "loss 0.5"), entry(2, "warning\n", "stderr"), entry(3, ", on\n")]
    result = read(entries)
    assert texts(result) == ["loss 0.5", "warning", ", on"]
    for n, line in enumerate(result):
        assert read(entries, line.position) == result[n + 1 :]


@given(
    st.text(st.sampled_from("ab\n"), max_size=40),
    st.lists(st.integers(1, 6), max_size=40),
    st.lists(st.integers(0, 2), max_size=40),
)
def test_lines_and_positions_do_not_depend_on_the_pieces(
    text: str, sizes: list[int], steps: list[int]
) -> None:
    entries, at, micros = [], 0, 10
    for n, size in enumerate([*sizes, len(text)]):
        if text[at : at + size]:
            entries.append(entry(micros, text[at : at + size]))
        at += size
        micros += steps[n] if n < len(steps) else 1
    result = read(entries)
    assert texts(result) == text.split("\n")[: len(result)]
    assert "\n".join(texts(result)) == text.removesuffix("\n")
    assert len({line.position for line in result}) == len(result)
    for n, line in enumerate(result):
        assert read(entries, line.position) == result[n + 1 :]


@pytest.mark.parametrize("text", ["", "1", "1.2", "1.2.x", "a.b.c", "1.2.3.4"])
def test_an_invalid_log_position_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="log position: expected"):
        Position.read(text)
