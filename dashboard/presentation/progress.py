"""A run's progress as lines of a terminal.

On a terminal one line is kept up to date; elsewhere (a log, a pipe) there is a line per round and
per change of state. Warnings and errors of the run's event list are printed in between.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TextIO

_CLEAR = "\r\x1b[K"


class Progress:
    """Shows headers of :func:`runs.queries.selectors.run_header` as they come."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self._live = out.isatty()
        self._shown: tuple[Any, ...] = ()
        self._pending = False

    def show(self, header: Mapping[str, Any], *, now: datetime) -> None:
        line = progress_line(header, now=now)
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            self._write(_CLEAR + line[:width])
            self._pending = True
        elif self._shown != (header["state"], header["committed_rounds"]):
            self._shown = (header["state"], header["committed_rounds"])
            self._write(line + "\n")

    def events(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print what somebody should know of; ``rows`` are oldest first."""
        for row in rows:
            if row["level"] != "info":
                who = "" if row["replica"] is None else f"replica {row['replica']}: "
                self.say(f"{row['level']}: {who}{row['message']}")

    def say(self, text: str) -> None:
        """A line of its own, above the line that is kept up to date."""
        self._write(f"{_CLEAR if self._pending else ''}{text}\n")
        self._pending = False

    def finish(self) -> None:
        """Leave the last progress line standing."""
        if self._pending:
            self._write("\n")
            self._pending = False

    def _write(self, text: str) -> None:
        # A terminal that was closed must not keep the server from stopping in order.
        with contextlib.suppress(OSError):
            self.out.write(text)
            self.out.flush()


def progress_line(header: Mapping[str, Any], *, now: datetime) -> str:
    """``running 1:23  round 5/16  loss 2.912  eval 2.800  12,300 tokens/s  replicas 4/4``."""
    until = header["ended_at"]
    since = datetime.fromisoformat(header["created_at"])
    elapsed = (datetime.fromisoformat(until) if until else now) - since
    speed = header["tokens_per_s"]
    return "  ".join(
        [
            f"{header['state']} {clock(elapsed.total_seconds())}",
            f"round {header['committed_rounds']}/{header['total_rounds']}",
            f"loss {_loss(header['train_loss'])}",
            f"eval {_loss(header['eval_loss'])}",
            f"{'–' if speed is None else format(round(speed), ',')} tokens/s",
            f"replicas {header['live']}/{header['target']}",
        ]
    )


def clock(seconds: float) -> str:
    """``1:23`` or ``1:02:03``."""
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
