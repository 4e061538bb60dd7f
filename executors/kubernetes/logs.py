"""A pod's log, read on behind a line that was read before.

The API gives a log from a *second* on (``sinceTime``), each line with the nanosecond the container
runtime took it at. A position is that time and how many lines of this very time came before, so
that the lines of the second that were read are passed over and none is lost. The order is the
log's own; the times of what a process writes to its two outputs at once may cross.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator

from executors.base import LogLine

LATE_NS = 1_000_000_000
"""A line so much later than the position shows that the line itself is no longer in the log (the
kubelet keeps the newest 10 MiB)."""

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")


def since(after: str) -> str:
    """What to ask the API for, to read on behind ``after``."""
    return _TIME.sub(r"\1\3", after.partition("#")[0])


def lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Whole lines of a stream; what it ends with counts as one."""
    held = b""
    for chunk in chunks:
        *whole, held = (held + chunk).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
    if held:
        yield held.decode(errors="replace")


def behind(timed_lines: Iterable[str], after: str) -> Iterator[LogLine]:
    """The lines behind the position ``after`` of a log that was read from :func:`since` on."""
    here = _nanoseconds(after.partition("#")[0]) if after else None
    held: list[LogLine] = []  # later than the position, but it has not been seen yet
    time, count = "", 0
    for timed in timed_lines:
        stamp, _, text = timed.partition(" ")
        now = _nanoseconds(stamp)
        if now is None:  # not a line of the container but a word of the kubelet
            stamp, text, now = time, timed, _nanoseconds(time) or 0
        count = count + 1 if stamp == time else 1
        time = stamp
        line = LogLine(text=text, position=f"{stamp}#{count}")
        if here is None:
            yield line
        elif line.position == after:
            here, held = None, []
        elif now > here:
            held.append(line)
            if now > here + LATE_NS:
                yield from held
                here, held = None, []
    yield from held


def _nanoseconds(stamp: str) -> int | None:
    match = _TIME.fullmatch(stamp)
    if match is None:
        return None
    whole = datetime.datetime.fromisoformat(match[1] + match[3]).timestamp()
    return int(whole) * 1_000_000_000 + int((match[2] or "").ljust(9, "0"))
