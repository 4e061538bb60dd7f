"""Rows of the runs list as HTML.

They are formatted here, in a few calls per row, because a page has hundreds of cells and tags of a
template take several times longer. ``data-f`` is the field of a live update that writes the part
(``static/js/runs.js``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from django.utils.formats import localize
from django.utils.safestring import SafeString

from dashboard.presentation import badges, formats, times
from dashboard.presentation.markup import fill
from runs.queries import table

NOT_YET = SafeString('<span class="muted">not yet</span>')
NOTHING = SafeString("")

ROW = """
<tr role="row" data-run="{id}"{seen}>
  <td role="cell" class="c-pick"><input type="checkbox" name="id" value="{id}" form="bulk" \
data-pick aria-label="Select {name}"></td>
  {state}
  <th scope="row" role="rowheader" class="c-name">
    <div class="line"><div class="title">
      <a class="name" href="{address}" title="{name}">{name}</a>
      <span class="badge-n" data-f="alerts" title="Unacknowledged alerts"{no_alerts}>{alert_icon}\
<span data-n>{alerts}</span><span class="visually-hidden"> alerts</span></span>
      <i class="tag tag-silent" data-f="silent"{not_stale}>silent</i>
      {archived}{deleting}
    </div>
    <div class="sub">
      {place}
      {tags}
    </div></div>
    <a class="why" href="{address}" data-f="why"{no_why}>{why}</a>
  </th>
  {cells}
  {differing}
</tr>
"""
HIDDEN = SafeString(" hidden")
ARCHIVED = SafeString('<i class="tag">archived</i>')
DELETING = SafeString('<i class="tag">being deleted</i>')
STATE = '<td role="cell" class="c-state" data-f="state">{}</td>'
SEEN = ' data-seen="{}"'
PLACE = '<span class="place" title="{0}">{0}</span>'
TAG = '<i class="tag">{}</i>'
MORE_TAGS = (
    '<i class="tag" title="{tags}">+{number}<span class="visually-hidden"> tags: {tags}</span></i>'
)
SPARK = (
    '<svg class="spark" viewBox="0 0 72 20" preserveAspectRatio="none" aria-hidden="true">'
    '<polyline points="{}"></polyline></svg>'
)
DIFFERING = '<td role="cell" data-label="{}" class="num c-differ">{}</td>'
DIFFERING_VALUE = '<span class="cut" title="{}">{}</span>'
DIFFERING_NOTHING = SafeString('<span class="muted">–</span>')


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run of the list.

    Attributes:
        header: the row of the run (:class:`archipelago.rows.RunHeader`).
        address: of the page of the run.
        place: owner and backends, as far as they are shown.
        more_tags: those for which there is no space.
        why: the reason of a failure.
        seen: time of the newest data of a training run.
        stale: whether this time is too long ago.
        spark: points of the curve, '' without one.
        ran_s: None before the run has started.
    """

    header: Mapping[str, Any]
    address: str
    place: str = ""
    tags: Sequence[str] = ()
    more_tags: Sequence[str] = ()
    why: str = ""
    archived: bool = False
    deleting: bool = False
    seen: str = ""
    stale: bool = False
    spark: str = ""
    ran_s: float | None = None


def html(
    row: Row, columns: tuple[str, ...], differing: Sequence[tuple[str, object]] = ()
) -> SafeString:
    """The row with these columns, and with cells for (label, value) of differing settings."""
    header = row.header
    template, cells = _columns_of(columns)
    return fill(
        template,
        *[value for cell in cells for value in cell.values(row)],
        id=header["id"],
        name=header["name"],
        address=row.address,
        seen=fill(SEEN, row.seen) if row.seen else NOTHING,
        state=_state(header["state"]) if "state" in columns else NOTHING,
        no_alerts=NOTHING if header["alerts"] else HIDDEN,
        alert_icon=badges.icon("degraded"),
        alerts=header["alerts"],
        not_stale=NOTHING if row.stale else HIDDEN,
        archived=ARCHIVED if row.archived else NOTHING,
        deleting=DELETING if row.deleting else NOTHING,
        place=fill(PLACE, row.place) if row.place else NOTHING,
        tags=_tags(row) if "tags" in columns else NOTHING,
        no_why=NOTHING if row.why else HIDDEN,
        why=row.why,
        differing=SafeString("".join(_differing(label, value) for label, value in differing)),
    )


@lru_cache(maxsize=64)
def _state(name: str) -> SafeString:
    return fill(STATE, badges.state(name))


def _tags(row: Row) -> SafeString:
    shown = [fill(TAG, tag) for tag in row.tags]
    if more := row.more_tags:
        shown.append(fill(MORE_TAGS, tags=" ".join(more), number=len(more)))
    return SafeString("".join(shown))


def _differing(label: str, value: object) -> SafeString:
    if value is None or value == "":
        return fill(DIFFERING, label, DIFFERING_NOTHING)
    text = fill(DIFFERING_VALUE, localize(value), formats.exact(value))
    return fill(DIFFERING, label, text)


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
    curve = fill(SPARK, row.spark) if row.spark else NOTHING
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


@lru_cache(maxsize=256)
def _columns_of(columns: tuple[str, ...]) -> tuple[str, list[_Cell]]:
    """The HTML of a row with these columns, and the cells whose values it takes."""
    labels = {column.name: column.label for column in table.COLUMNS}
    shown = {name: cell for name, cell in _CELLS.items() if name in columns}
    cells = "\n  ".join(cell.html(labels[name]) for name, cell in shown.items())
    return ROW.replace("{cells}", cells), list(shown.values())
