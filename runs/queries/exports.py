"""Export all rows of a run in chunks, without sampling.

Each chunk is read by key with its own query: no cursor stays open while a slow client downloads,
and memory holds one chunk, whatever the size of the run. Rows that are added during an export can
be missing; no row is repeated. :mod:`runs.queries.export_formats` converts chunks to bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from django.db.models import (
    BooleanField,
    DateTimeField,
    Field,
    FloatField,
    IntegerField,
    Model,
)

from runs.metrics.blocks import Points, concatenate
from runs.models import (
    Contribution,
    Event,
    LogLine,
    MetricBlock,
    Replica,
    ReplicaAttempt,
    Round,
    Run,
)

Kind = Literal["int", "float", "text", "bool", "time"]
Chunk = Mapping[str, Sequence[Any]]
"""Column name -> values, of equal length. Times are datetimes; unknown values are None."""

ROWS = 5000
BLOCKS = 32
"""Blocks of points per chunk: at most 32 x 512 points."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table to export, with its columns in the order of the file."""

    columns: Mapping[str, Kind]
    chunks: Callable[[Run], Iterator[Chunk]]


def points_of(run: Run) -> Iterator[Chunk]:
    """All points by series, replica and step, including NaN and infinities."""
    blocks = MetricBlock.objects.filter(run=run, level=0)
    pairs = sorted(
        blocks.values_list("series", "replica__number", "replica_id").distinct(),
        key=lambda pair: (pair[0], -1 if pair[1] is None else pair[1]),
    )
    for series, number, replica_id in pairs:
        last = -1
        while True:
            rows = list(
                blocks.filter(series=series, replica_id=replica_id, index__gt=last)
                .order_by("index")
                .values_list("index", "data")[:BLOCKS]
            )
            if not rows:
                break
            last = rows[-1][0]
            points = concatenate([Points.unpack(bytes(data)) for _, data in rows])
            yield {
                "series": [series] * len(points),
                "replica": [number] * len(points),
                "step": points.step.tolist(),
                "round": points.round.tolist(),
                "tokens": points.tokens.tolist(),
                "wall_s": points.wall_s.tolist(),
                "value": points.value.tolist(),
            }


def _table(
    model: type[Model], run: str, columns: Iterable[str], *, key: str = "id", **lookups: str
) -> Table:
    """A table of the rows of ``model`` whose lookup ``run`` is the run, by the unique ``key``.

    A column is the field of that name, or one of ``lookups``.
    """
    names = tuple(columns)
    paths = [lookups.get(name, name) for name in names]

    def chunks(of: Run) -> Iterator[Chunk]:
        last = -1
        rows = model._default_manager.filter(**{run: of}).order_by(key)
        while chunk := list(rows.filter(**{f"{key}__gt": last}).values_list(key, *paths)[:ROWS]):
            last = chunk[-1][0]
            _, *values = zip(*chunk, strict=True)
            yield dict(zip(names, values, strict=True))
            if len(chunk) < ROWS:
                return

    kinds = (_kind(model, path) for path in paths)
    return Table(columns=dict(zip(names, kinds, strict=True)), chunks=chunks)


def _kind(model: Any, path: str) -> Kind:
    """The kind of the field that a lookup such as ``replica__number`` leads to."""
    *relations, name = path.split("__")
    for relation in relations:
        model = model._meta.get_field(relation).related_model
    field = model._meta.get_field(name)
    return next((kind for fields, kind in _KINDS if isinstance(field, fields)), "text")


_KINDS: tuple[tuple[type[Field[Any, Any]], Kind], ...] = (
    (BooleanField, "bool"),
    (DateTimeField, "time"),
    (FloatField, "float"),
    (IntegerField, "int"),
)

_POINT: dict[str, Kind] = {
    "series": "text",
    "replica": "int",
    "step": "int",
    "round": "int",
    "tokens": "int",
    "wall_s": "float",
    "value": "float",
}

TABLES: dict[str, Table] = {
    "points": Table(columns=_POINT, chunks=points_of),
    "rounds": _table(
        Round,
        "run",
        (
            *("round", "fragment", "state", "reason", "plan", "contributors", "tokens_total"),
            *("loss", "eval_loss", "weights_digest", "planned_at", "committed_at"),
        ),
        key="number",
        round="number",
        plan="mode",
    ),
    "contributions": _table(
        Contribution,
        "round__run",
        (
            *("round", "replica", "state", "reason", "base_round", "tokens", "steps", "weight"),
            *("loss", "norm", "update_norm", "cosine", "size_bytes", "bytes_up", "bytes_down"),
            *("requests", "started_at", "uploaded_at", "committed_at", "weights_digest"),
        ),
        round="round__number",
        replica="replica__number",
    ),
    "replicas": _table(
        Replica,
        "run",
        (
            *("replica", "backend", "hardware", "region", "state", "reason", "round", "step"),
            *("tokens", "restarts", "device", "host"),
        ),
        key="number",
        replica="number",
        backend="pool__backend",
        hardware="pool__hardware",
        region="pool__region",
        reason="state_reason",
    ),
    "attempts": _table(
        ReplicaAttempt,
        "replica__run",
        (
            *("replica", "attempt", "launch_key", "cause", "exit_code", "message", "created_at"),
            *("launched_at", "started_at", "ended_at", "price_usd_h", "cost_usd"),
        ),
        replica="replica__number",
        attempt="number",
    ),
    "events": _table(
        Event,
        "run",
        (
            *("id", "at", "level", "kind", "replica", "actor"),
            *("from_state", "to_state", "message"),
        ),
        replica="replica__number",
        actor="actor__username",
    ),
    "logs": _table(
        LogLine,
        "replica__run",
        ("id", "at", "replica", "incarnation", "level", "message"),
        replica="replica__number",
    ),
}
"""All tables that can be exported, by name."""
