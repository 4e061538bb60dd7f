"""Lines of a Sandbox's output, with positions that outlive the reader.

Modal keeps a log as entries with a time and any piece of text, and gives them by time, during the
Sandbox's life and after it (``Sandbox.logs``; a day on its smallest plan). A position is the
time of an entry in microseconds, its number among those of that time, and how many of its
characters are behind. Text of one source that another interrupts counts as a line.

An entry that reaches Modal's log late, with a time before what was read already, is missed by
who goes on from a position; reading from the start shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from executors.base import LogLine

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

MARGIN_S = 60.0
"""Between Modal's clocks and ours, and between a Sandbox's record and its first line."""


@dataclass(frozen=True, order=True)
class Position:
    """Behind ``chars`` characters of entry ``number`` of those at ``micros``."""

    micros: int = 0
    number: int = 0
    chars: int = 0

    def __str__(self) -> str:
        return f"{self.micros}.{self.number}.{self.chars}"

    @classmethod
    def read(cls, text: str) -> Position:
        """Raises :class:`ValueError` for what is no position of ours."""
        try:
            micros, number, chars = map(int, text.split("."))
        except ValueError:
            raise ValueError(
                f"log position: expected what logs() gave before, found {text!r}"
            ) from None
        return cls(micros, number, chars)

    @property
    def when(self) -> datetime:
        return EPOCH + self.micros * _MICROSECOND


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A piece of a log as Modal gives it."""

    when: datetime
    source: str
    text: str

    @property
    def micros(self) -> int:
        return (self.when - EPOCH) // _MICROSECOND


def lines(entries: Iterable[Entry], after: Position, *, ended: bool) -> Iterator[LogLine]:
    """Lines behind ``after``. ``entries`` are in order and begin with all those of its time. Text
    that no newline ends is a line where another source goes on, or the job has ``ended``."""
    held, source = "", ""
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
        if held and entry.source != source:
            yield LogLine(text=held, position=str(reached))
            held = ""
        source = entry.source
        *whole, rest = entry.text[start:].split("\n")
        behind = start
        for part in whole:
            behind += len(part) + 1
            reached = Position(micros, number, behind)
            yield LogLine(text=held + part, position=str(reached))
            held = ""
        held += rest
        reached = Position(micros, number, len(entry.text))
    if held and ended:
        yield LogLine(text=held, position=str(reached))
