"""Format numbers, tables, colour and the progress line for a terminal.

On a terminal the progress line is updated in place; elsewhere (a log, a pipe) a line is printed per
round and per state change. Colour is used only on a terminal and without ``NO_COLOR``
(https://no-color.org). An unknown value is an en dash, never 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

from archipelago.rows import RunHeader

UNKNOWN = "–"
_CLEAR = "\r\x1b[K"
_COLOURS = {
    "running": "34",
    "succeeded": "32",
    "failed": "31",
    "degraded": "33",
    "stalled": "33",
    "lost": "31",
    "suspect": "33",
    "error": "31",
    "warning": "33",
    "cancelled": "90",
}


def print_json(value: Any) -> int:
    """Print JSON of an answer; returns the exit status 0."""
    json.dump(value, sys.stdout, indent=2, default=dict)
    print()
    return 0


def has_colour(out: TextIO) -> bool:
    return out.isatty() and not os.environ.get("NO_COLOR")


def painted(text: str, state: str, *, colour: bool) -> str:
    code = _COLOURS.get(state)
    return f"\x1b[{code}m{text}\x1b[0m" if colour and code else text


def safe(text: str) -> str:
    """The text with control characters and line breaks replaced: names come from other users, and
    must not send escape sequences to the terminal."""
    return "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in text)


def block(text: str) -> str:
    """A message of one or more lines, each :func:`safe`. Continuation lines are indented, so that
    none can pass for a separate message."""
    lines = text.replace("\r\n", "\n").rstrip("\n").split("\n")
    return "\n    ".join(safe(line) for line in lines)


def count(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if suffix == 'k' else size):.3g}{suffix}"
    return f"{value:,.0f}"


def size(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    for unit, suffix in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= unit:
            return f"{value / unit:.3g} {suffix}"
    return f"{value:.0f} B"


def loss(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value * 100:.0f}%"


def money(value: float | None, *, known: bool = True) -> str:
    """Dollars; ``>`` marks a sum with unknown parts."""
    if value is None or not (value or known):
        return "unknown"
    return f"{'' if known else '>'}${value:,.2f}"


def rate(usd_h: float | None, *, known: bool = True) -> str:
    """Dollars an hour of the running jobs; a dash if there are none."""
    return UNKNOWN if known and not usd_h else money(usd_h, known=known)


def lower_bound(value: float, *, known: bool = True) -> str:
    """A count; ``>`` marks one with unknown parts."""
    if known:
        return count(value)
    return f">{count(value)}" if value else "unknown"


def clock(seconds: float | None) -> str:
    """``1:23`` or ``1:02:03``."""
    if seconds is None:
        return UNKNOWN
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def local_time(text: str | None) -> str:
    parsed = moment(text)
    return parsed.astimezone().strftime("%Y-%m-%d %H:%M:%S") if parsed else UNKNOWN


def age(text: str | None, *, now: datetime | None = None) -> str:
    parsed = moment(text)
    if parsed is None:
        return UNKNOWN
    seconds = ((now or datetime.now(UTC)) - parsed).total_seconds()
    for unit, suffix in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds // unit:.0f} {suffix}"
    return f"{max(seconds, 0):.0f} s"


def bar(fraction: float, width: int = 20) -> str:
    """A bar with a resolution of an eighth of a character."""
    eighths = round(min(max(fraction, 0.0), 1.0) * width * 8)
    full, part = divmod(eighths, 8)
    text = "█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")
    return text.ljust(width, "·")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> list[str]:
    """Lines of an aligned table. ``right`` has an ``r`` for each right-aligned column."""
    cells = [list(heads), *([safe(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    aligned = right.ljust(len(heads), "l")
    return [
        "  ".join(
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, aligned, strict=True)
        ).rstrip()
        for row in cells
    ]


def print_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], right: str = "", empty: str = ""
) -> int:
    """Print a :func:`table`, or the message ``empty`` if there is one and no row; returns the exit
    status 0."""
    if empty and not rows:
        print(empty, file=sys.stderr)
        return 0
    for line in table(heads, rows, right=right):
        print(line)
    return 0


def facts(values: Mapping[str, str], *, right: str = "") -> list[str]:
    """Aligned lines of a name and its value each."""
    return table(["", ""], [*values.items()], right=right)[1:]


def print_facts(values: Mapping[str, str], *, right: str = "") -> None:
    for line in facts(values, right=right):
        print(line)


class StatusLine:
    """A line that is updated in place on a terminal; elsewhere one line per change."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self._live = out.isatty()
        self._shown: object = None
        self._pending = False

    def update(
        self, line: str, *, change: object, paint: Callable[[str], str] = lambda text: text
    ) -> None:
        """Show ``line``. Elsewhere than on a terminal it is printed if ``change`` differs from
        that of the line before."""
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            # Truncate before colouring: escape sequences have no width.
            self._write(_CLEAR + paint(line[:width]))
            self._pending = True
        elif self._shown != change:
            self._shown = change
            self._write(line + "\n")

    def log(self, text: str) -> None:
        """Print a line above the status line."""
        self._write(f"{_CLEAR if self._pending else ''}{text}\n")
        self._pending = False

    def finish(self) -> None:
        """Keep the last status line."""
        if self._pending:
            self._write("\n")
            self._pending = False

    def _write(self, text: str) -> None:
        # A closed terminal must not keep a process from shutting down cleanly.
        with contextlib.suppress(OSError):
            self.out.write(text)
            self.out.flush()


class Progress(StatusLine):
    """The progress display of one run."""

    def show(self, run: RunHeader, *, now: datetime) -> None:
        def paint(text: str) -> str:
            return painted(text, run.state, colour=has_colour(self.out))

        change = (run.state, run.committed_rounds)
        self.update(progress_line(run, now=now), change=change, paint=paint)


def progress_line(run: RunHeader, *, now: datetime) -> str:
    started, ended = moment(run.created_at), moment(run.ended_at)
    elapsed_s = ((ended or now) - started).total_seconds() if started else None
    parts = [
        f"{run.state:<9} {bar(run.fraction)} {run.committed_rounds}/{run.total_rounds}",
        f"loss {loss(run.train_loss)}",
        f"{count(run.tokens_per_s)} tokens/s",
        f"replicas {run.live}/{run.target}",
        clock(elapsed_s) + (f" (eta {clock(run.eta_s)})" if run.eta_s is not None else ""),
    ]
    if run.cost_usd or not run.cost_known:
        parts.append(money(run.cost_usd, known=run.cost_known))
    return "  ".join(parts)
