"""Progress of a run on a terminal.

On a terminal one line is updated in place; elsewhere (a log, a pipe) a line is printed per round
and per state change. Warnings and errors of the run are printed in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from archipelago.terminal import UNKNOWN, StatusLine, clock, loss


class Progress(StatusLine):
    """The progress display. Its input are headers of :func:`runs.queries.selectors.run_header`."""

    def show(self, header: Mapping[str, Any], *, now: datetime) -> None:
        change = (header["state"], header["committed_rounds"])
        self.update(progress_line(header, now=now), change=change)

    def events(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print warnings and errors; ``rows`` are oldest first."""
        for row in rows:
            if row["level"] != "info":
                who = "" if row["replica"] is None else f"replica {row['replica']}: "
                self.log(f"{row['level']}: {who}{row['message']}")


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
            f"loss {loss(header['train_loss'])}",
            f"eval {loss(header['eval_loss'])}",
            f"{UNKNOWN if speed is None else format(round(speed), ',')} tokens/s",
            f"replicas {header['live']}/{header['target']}",
        ]
    )
