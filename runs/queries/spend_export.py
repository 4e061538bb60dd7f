"""The spending of a period as a table: the rows of all tables of ``/spend``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runs.queries.exports import Chunk, Kind

COLUMNS: Mapping[str, Kind] = {
    **dict.fromkeys(("by", "key", "name"), "text"),
    "jobs": "int",
    "usd": "float",
    "unpriced_jobs": "int",
    "unpriced_s": "float",
    "deleted": "bool",
}
"""``by``: what the row sums up. Only rows with the same value add up to ``total``, and those of
tags do not: a run counts under each of its tags."""
GROUPS = {"backend": "backends", "owner": "owners", "run": "runs", "tag": "tags"}


def chunks(spend: Mapping[str, Any]) -> Iterator[Chunk]:
    """One chunk, of the result of :func:`runs.queries.spend.spend` without a limit."""
    rows: list[Mapping[str, Any]] = [{**spend["total"], "by": "total"}]
    rows += [{**day, "by": "day", "key": day["day"], "name": day["day"]} for day in spend["days"]]
    for by, table in GROUPS.items():
        rows += [{**row, "by": by, "name": row["label"]} for row in spend[table]]
    columns = {name: [row.get(name) for row in rows] for name in COLUMNS}
    columns["usd"] = [None if usd is None else round(usd, 6) for usd in columns["usd"]]
    yield columns
