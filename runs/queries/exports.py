"""All of a run's rows, never sampled, a chunk at a time.

A chunk is read by key with a query of its own: no cursor is held open while a slow reader takes its
time, and memory is one chunk's whatever the size of the run. Rows that come while an export runs
may be in it or not; no row comes twice. How chunks become bytes is
:mod:`runs.queries.export_formats`'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from django.db.models import QuerySet

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
"""Column name -> values, all of one length. Times are datetimes; what is not known is None."""

ROWS = 5000
BLOCKS = 32
"""Blocks of points in a chunk: at most 32 x 512 points."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """``columns`` in the order they are written."""

    columns: Mapping[str, Kind]
    chunks: Callable[[Run], Iterator[Chunk]]


def points_of(run: Run) -> Iterator[Chunk]:
    """Every point of every series, by series, replica and step. NaN and infinities as they are."""
    blocks = MetricBlock.objects.filter(run=run, level=0)
    pairs = sorted(
        blocks.values_list("series", "replica__number", "replica_id").distinct(),
        key=lambda pair: (pair[0], -1 if pair[1] is None else pair[1]),
    )
    for series, number, replica_id in pairs:
        last = -1
        while True:
            found = list(
                blocks.filter(series=series, replica_id=replica_id, index__gt=last)
                .order_by("index")
                .values_list("index", "data")[:BLOCKS]
            )
            if not found:
                break
            last = found[-1][0]
            points = concatenate([Points.unpack(bytes(data)) for _, data in found])
            yield {
                "series": [series] * len(points),
                "replica": [number] * len(points),
                "step": points.step.tolist(),
                "round": points.round.tolist(),
                "tokens": points.tokens.tolist(),
                "wall_s": points.wall_s.tolist(),
                "value": points.value.tolist(),
            }


def rounds_of(run: Run) -> Iterator[Chunk]:
    return _by_key(Round.objects.filter(run=run), "number", _ROUND)


def contributions_of(run: Run) -> Iterator[Chunk]:
    return _by_key(Contribution.objects.filter(round__run=run), "id", _CONTRIBUTION)


def replicas_of(run: Run) -> Iterator[Chunk]:
    return _by_key(Replica.objects.filter(run=run), "number", _REPLICA)


def attempts_of(run: Run) -> Iterator[Chunk]:
    return _by_key(ReplicaAttempt.objects.filter(replica__run=run), "id", _ATTEMPT)


def events_of(run: Run) -> Iterator[Chunk]:
    return _by_key(Event.objects.filter(run=run), "id", _EVENT)


def logs_of(run: Run) -> Iterator[Chunk]:
    return _by_key(LogLine.objects.filter(replica__run=run), "id", _LOG)


def _by_key(
    rows: QuerySet[Any, Any], key: str, columns: Mapping[str, tuple[str, Kind]]
) -> Iterator[Chunk]:
    """``columns`` are name -> (lookup, kind). ``key`` is unique among ``rows``."""
    lookups = [lookup for lookup, _ in columns.values()]
    last = -1
    while True:
        found: list[tuple[Any, ...]] = list(
            rows.filter(**{f"{key}__gt": last}).order_by(key).values_list(key, *lookups)[:ROWS]
        )
        if not found:
            return
        last = found[-1][0]
        _, *values = zip(*found, strict=True)
        yield dict(zip(columns, values, strict=True))
        if len(found) < ROWS:
            return


_ROUND: dict[str, tuple[str, Kind]] = {
    "round": ("number", "int"),
    "fragment": ("fragment", "int"),
    "state": ("state", "text"),
    "reason": ("reason", "text"),
    "plan": ("mode", "text"),
    "contributors": ("contributors", "int"),
    "tokens_total": ("tokens_total", "int"),
    "loss": ("loss", "float"),
    "eval_loss": ("eval_loss", "float"),
    "weights_digest": ("weights_digest", "text"),
    "planned_at": ("planned_at", "time"),
    "committed_at": ("committed_at", "time"),
}
_CONTRIBUTION: dict[str, tuple[str, Kind]] = {
    "round": ("round__number", "int"),
    "replica": ("replica__number", "int"),
    "state": ("state", "text"),
    "reason": ("reason", "text"),
    "base_round": ("base_round", "int"),
    "tokens": ("tokens", "int"),
    "steps": ("steps", "int"),
    "weight": ("weight", "float"),
    "loss": ("loss", "float"),
    "norm": ("norm", "float"),
    "update_norm": ("update_norm", "float"),
    "cosine": ("cosine", "float"),
    "size_bytes": ("size_bytes", "int"),
    "bytes_up": ("bytes_up", "int"),
    "bytes_down": ("bytes_down", "int"),
    "requests": ("requests", "int"),
    "started_at": ("started_at", "time"),
    "uploaded_at": ("uploaded_at", "time"),
    "committed_at": ("committed_at", "time"),
    "weights_digest": ("weights_digest", "text"),
}
_REPLICA: dict[str, tuple[str, Kind]] = {
    "replica": ("number", "int"),
    "backend": ("pool__backend", "text"),
    "hardware": ("pool__hardware", "text"),
    "region": ("pool__region", "text"),
    "state": ("state", "text"),
    "reason": ("state_reason", "text"),
    "round": ("round", "int"),
    "step": ("step", "int"),
    "tokens": ("tokens", "int"),
    "restarts": ("restarts", "int"),
    "device": ("device", "text"),
    "host": ("host", "text"),
}
_ATTEMPT: dict[str, tuple[str, Kind]] = {
    "replica": ("replica__number", "int"),
    "attempt": ("number", "int"),
    "launch_key": ("launch_key", "text"),
    "cause": ("cause", "text"),
    "exit_code": ("exit_code", "int"),
    "message": ("message", "text"),
    "created_at": ("created_at", "time"),
    "launched_at": ("launched_at", "time"),
    "started_at": ("started_at", "time"),
    "ended_at": ("ended_at", "time"),
    "price_usd_h": ("price_usd_h", "float"),
    "cost_usd": ("cost_usd", "float"),
}
_EVENT: dict[str, tuple[str, Kind]] = {
    "id": ("id", "int"),
    "at": ("at", "time"),
    "level": ("level", "text"),
    "kind": ("kind", "text"),
    "replica": ("replica__number", "int"),
    "actor": ("actor__username", "text"),
    "from_state": ("from_state", "text"),
    "to_state": ("to_state", "text"),
    "message": ("message", "text"),
}
_LOG: dict[str, tuple[str, Kind]] = {
    "id": ("id", "int"),
    "at": ("at", "time"),
    "replica": ("replica__number", "int"),
    "incarnation": ("incarnation", "text"),
    "level": ("level", "text"),
    "message": ("message", "text"),
}
_POINT: dict[str, Kind] = {
    "series": "text",
    "replica": "int",
    "step": "int",
    "round": "int",
    "tokens": "int",
    "wall_s": "float",
    "value": "float",
}


def _kinds(columns: Mapping[str, tuple[str, Kind]]) -> dict[str, Kind]:
    return {name: kind for name, (_, kind) in columns.items()}


TABLES: dict[str, Table] = {
    "points": Table(columns=_POINT, chunks=points_of),
    "rounds": Table(columns=_kinds(_ROUND), chunks=rounds_of),
    "contributions": Table(columns=_kinds(_CONTRIBUTION), chunks=contributions_of),
    "replicas": Table(columns=_kinds(_REPLICA), chunks=replicas_of),
    "attempts": Table(columns=_kinds(_ATTEMPT), chunks=attempts_of),
    "events": Table(columns=_kinds(_EVENT), chunks=events_of),
    "logs": Table(columns=_kinds(_LOG), chunks=logs_of),
}
"""What there is to export."""
