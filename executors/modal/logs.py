"""Lines of a Sandbox's output, with positions that are valid in any process.

Modal stores a log as entries with a time and a piece of text, and returns them by time, during the
Sandbox's life and after it (``Sandbox.logs``; one day on the smallest plan). A position is the time
of an entry in microseconds, its number among entries of that time, and the number of characters
read. Text of one source that is interrupted by another counts as a line.

An entry that arrives late, with a time before a position, is missed when reading from that position
and shown when reading from the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from executors.base import LogLine

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

MARGIN_S = 60.0
"""Tolerance for clock differences, and for output before a Sandbox's creation time."""


@dataclass(frozen=True, order=True)
class Position:
    """The position after ``chars`` characters of entry ``number`` among those at ``micros``."""

    micros: int = 0
    number: int = 0
    chars: int = 0

    def __str__(self) -> str:
        return f"{self.micros}.{self.number}.{self.chars}"

    @classmethod
    def read(cls, text: str) -> Position:
        """Parse a position. Raises :class:`ValueError`."""
        try:
            micros, number, chars = map(int, text.split("."))
        except ValueError:
            raise ValueError(
                f"log position: expected a position of logs(), found {text!r}"
            ) from None
        return cls(micros, number, chars)

    @property
    def when(self) -> datetime:
        return EPOCH + self.micros * _MICROSECOND


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of Modal's log."""

    when: datetime
    source: str
    text: str

    @property
    def micros(self) -> int:
        return (self.when - EPOCH) // _MICROSECOND


def lines(entries: Iterable[Entry], after: Position, *, ended: bool) -> Iterator[LogLine]:
    """Lines after ``after``. ``entries`` are ordered and include all entries of its time. Text
    without a newline is a line if another source follows or the job has ``ended``."""
    partial, source = "", ""
    reached = after
    micros, number = -1, 0
    for entry in entries:
        number = number + 1 if entry.micros == micros else 0
        micros = entry.micros
        if (micros, number) < (after.micros, after.number):
            continue
        start = after.chars if (micros, number) == (after.micros, after.number) else 0
        if start >= len(entry.text):
            continue
        if partial and entry.source != source:
            yield LogLine(text=partial, position=str(reached))
            partial = ""
        source = entry.source
        *whole, rest = entry.text[start:].split("\n")
        chars = start
        for part in whole:
            chars += len(part) + 1
            reached = Position(micros, number, chars)
            yield LogLine(text=partial + part, position=str(reached))
            partial = ""
        partial += rest
        reached = Position(micros, number, len(entry.text))
    if partial and ended:
        yield LogLine(text=partial, position=str(reached))
