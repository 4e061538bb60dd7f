"""Cells of a row of the runs list, after the cell with the run's name.

They are formatted here, in one call per row, because a page has hundreds and tags of a template
take several times longer. ``data-f`` is the field of a live update that writes the cell
(``static/js/runs.js``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from django.utils.html import format_html
from django.utils.safestring import SafeString

from dashboard.presentation import badges, formats, times
from runs.queries import table

SPARK = (
    '<svg class="spark" viewBox="0 0 72 20" preserveAspectRatio="none" aria-hidden="true">'
    '<polyline points="{}"></polyline></svg>'
)
NOT_YET = SafeString('<span class="muted">not yet</span>')


@dataclass(frozen=True, kw_only=True)
class Row:
    """``header`` is the row of the run (:class:`archipelago.rows.RunHeader`); ``spark`` are the
    points of its curve, '' without one; ``ran_s`` is None before it has started."""

    header: Mapping[str, Any]
    spark: str
    ran_s: float | None


@dataclass(frozen=True)
class _Cell:
    """``attributes`` and ``content`` are HTML with a ``{}`` for each of the ``values``."""

    attributes: str
    content: str
    values: Callable[[Row], tuple[object, ...]]

    def html(self, label: str) -> str:
        start = f'<td role="cell" data-label="{label}" {self.attributes}'.rstrip()
        return f"{start}>{self.content}</td>"


def _number(field: str, text: Callable[[Mapping[str, Any]], str]) -> _Cell:
    return _Cell(f'class="num" data-f="{field}"', "{}", lambda row: (text(row.header),))


def _rounds(row: Row) -> tuple[object, ...]:
    done, total = row.header["committed_rounds"], row.header["total_rounds"]
    fraction = f"{done / total:.4f}" if total else "0"
    return fraction, badges.look(row.header["state"]).tone, done, total


def _loss(row: Row) -> tuple[object, ...]:
    curve = format_html(SPARK, row.spark) if row.spark else ""
    return curve, formats.loss(row.header["eval_loss"])


def _started(row: Row) -> tuple[object, ...]:
    at = row.header["started_at"]
    return (times.moment(at) if at else NOT_YET,)


def _ran(row: Row) -> tuple[object, ...]:
    start, end = (row.header[name] or "" for name in ("started_at", "ended_at"))
    return start, end, formats.duration(row.ran_s)


_CELLS = {
    "replicas": _Cell(
        "",
        '<span data-f="replicas">{}/{}</span>',
        lambda row: (row.header["live"], row.header["target"]),
    ),
    "rounds": _Cell(
        'class="c-rounds"',
        '<span class="rounds">'
        '<span class="bar" data-f="bar" data-fraction="{}" data-tone="{}" aria-hidden="true"><i>'
        '</i></span><span data-f="rounds">{}/{}</span></span>',
        _rounds,
    ),
    "loss": _Cell('class="num strong c-loss"', '{}<span data-f="eval_loss">{}</span>', _loss),
    "train": _number("train_loss", lambda run: formats.loss(run["train_loss"])),
    "tokens": _number("tokens", lambda run: formats.count(run["tokens"])),
    "speed": _number("tokens_per_s", lambda run: formats.count(run["tokens_per_s"])),
    "goodput": _number("goodput", lambda run: formats.percent(run["goodput"])),
    "cost": _number("cost", lambda run: formats.spent(run["cost_usd"], run["cost_known"])),
    "rate": _number("rate", lambda run: formats.rate(run["usd_h"], run["usd_h_known"])),
    "started": _Cell('class="num" data-f="started"', "{}", _started),
    "ran": _Cell('class="num" data-f="ran" data-from="{}" data-to="{}"', "{}", _ran),
    "age": _Cell('class="num"', "{}", lambda row: (times.moment(row.header["created_at"]),)),
}
"""Column (:data:`runs.queries.table.COLUMNS`) -> its cell, in the order of the table."""


def cells(row: Row, columns: tuple[str, ...]) -> SafeString:
    """The cells of a row in these columns."""
    html, shown = _cells_of(columns)
    return format_html(html, *(value for cell in shown for value in cell.values(row)))


@lru_cache(maxsize=256)
def _cells_of(columns: tuple[str, ...]) -> tuple[str, list[_Cell]]:
    labels = {column.name: column.label for column in table.COLUMNS}
    shown = {name: cell for name, cell in _CELLS.items() if name in columns}
    html = "\n  ".join(cell.html(labels[name]) for name, cell in shown.items())
    return html, list(shown.values())
