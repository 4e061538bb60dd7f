"""Addresses of every page, API operation and export that shows a run.

Some show the rows of another address in another form and send no other statement, so they are left
out on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.db import connection

from runs.queries.export_formats import CONTENT_TYPES
from runs.queries.exports import TABLES

SERIES = (
    "loss,lr,grad_norm,step_s,eval_loss,tokens_per_s,norm,norm_low",
    "norm_high,cosine,update_norm,phase_compute,gpu_busy,rss_bytes,bytes_up,up_bytes_per_s",
)
TABS = ("charts", "fleet", "rounds", "logs", "activity")
VIEWS = ("&last=1", "&points=10", "&replica=0", "&own=0")
AXES = ("step", "round", "tokens", "wall")


def addresses(run: Any) -> Iterator[str]:
    yield from statements_of(run)
    if connection.vendor != "postgresql":
        yield from variants(run)


def variants(run: Any) -> Iterator[str]:
    """Addresses that send only statements of :func:`statements_of`."""
    at = f"/runs/{run.pk}/"
    for tab in TABS:
        yield f"{at}?tab={tab}"
    for axis in AXES:
        for more, names in zip(VIEWS, SERIES * 2, strict=True):
            yield f"{at}series.json?of={names}&x={axis}{more}"
    for table in TABLES:
        for format in sorted(CONTENT_TYPES.keys() - {"csv"}):
            yield f"/api/runs/{run.pk}/export/{table}.{format}"


def statements_of(run: Any) -> Iterator[str]:
    """Addresses that together send every statement."""
    yield "/"
    yield "/runs.json"
    yield "/runs/facets"
    yield "/runs/totals"
    yield "/?columns=tags,eval_loss,train_loss,cost,goodput,tokens"
    yield "/api/runs"
    at = f"/runs/{run.pk}/"
    yield at
    yield from (f"{at}?tab={tab}" for tab in ("rounds", "timeline", "replicas", "system", "logs"))
    yield from (
        at + name
        for name in (
            "snapshot.json",
            "logs.json",
            "checkpoints",
            "activity",
            "findings",
            "rounds.json",
        )
    )
    for axis in AXES:
        for names in SERIES:
            yield f"{at}series.json?of={names}&x={axis}"
            yield f"{at}series.json?of={names}&x={axis}&from=0&to=9e15"
    yield f"{at}heatmap.json"
    yield f"{at}timeline.json"
    for number in run.rounds.order_by("number").values_list("number", flat=True)[:8]:
        yield f"{at}rounds/{number}.json"
        yield f"{at}heatmap.json?to={number}"
        yield f"{at}timeline.json?to={number}"
    for number in run.replicas.values_list("number", flat=True):
        yield f"{at}replicas/{number}/"
        yield f"/api/runs/{run.pk}/replicas/{number}"
    yield f"/compare?ids={run.pk}"
    yield f"/compare.json?ids={run.pk}"
    yield f"/compare.csv?ids={run.pk}"
    for name in (
        "",
        "/info",
        "/document",
        "/replicas",
        "/rounds",
        "/events",
        "/logs",
        "/series",
        "/alerts",
        "/checkpoints",
        "/points?series=loss&replica=0",
        "/points?series=eval_loss",
    ):
        yield f"/api/runs/{run.pk}{name}"
    yield f"/api/compare?id={run.pk}"
    for table in TABLES:
        yield f"/api/runs/{run.pk}/export/{table}.csv"
    yield "/metrics"


def broken(client: Any, run: Any) -> list[tuple[str, int]]:
    """Return the addresses that respond with an error, and its status."""
    result = []
    for address in addresses(run):
        response = client.get(address)
        if getattr(response, "streaming", False):
            try:
                b"".join(response.streaming_content)
            except Exception:
                result.append((address, 500))
        if response.status_code >= 400:
            result.append((address, response.status_code))
    return result
