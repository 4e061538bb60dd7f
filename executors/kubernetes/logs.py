"""Continue reading a pod's log after a given line.

The API returns a log from a *second* on (``sinceTime``), and each line has a timestamp of the
container runtime in nanoseconds. A position is that timestamp and the number of the line among
lines of the same timestamp. Lines of the first second that were read before are skipped, and none
is lost. The order is that of the log; timestamps of stdout and stderr can be out of order.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator

from executors.base import LogLine

LATE_NS = 1_000_000_000
"""A line this much later than the position shows that the position's line is no longer in the log
(the kubelet keeps the newest 10 MiB)."""

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")


def since(after: str) -> str:
    """``sinceTime`` for reading the lines after the position ``after``."""
    return _TIME.sub(r"\1\3", after.partition("#")[0])


def lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """The lines of a stream; a partial last line counts as a line."""
    partial = b""
    for chunk in chunks:
        *whole, partial = (partial + chunk).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
    if partial:
        yield partial.decode(errors="replace")


def behind(timed_lines: Iterable[str], after: str) -> Iterator[LogLine]:
    """The lines after the position ``after``, of a log that was read from :func:`since` on."""
    here = _nanoseconds(after.partition("#")[0]) if after else None
    held: list[LogLine] = []  # lines later than the position, which was not reached yet
    time, count = "", 0
    for timed in timed_lines:
        stamp, _, text = timed.partition(" ")
        now = _nanoseconds(stamp)
        if now is None:  # a message of the kubelet, without a timestamp
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
