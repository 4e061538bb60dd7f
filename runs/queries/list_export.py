"""All runs that match a query, one row each, as the chunks of an export.

Pages of the list are read by key, so memory holds one of them. A run whose sorted value changes
meanwhile can change its page: it is exported once.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from django.db.models import QuerySet

from runs.json_values import texts
from runs.models import Run
from runs.queries import listing, selectors
from runs.queries.exports import Chunk, Kind
from runs.queries.listing import Order

PAGE = 200

COLUMNS: Mapping[str, Kind] = {
    **dict.fromkeys(("id", "name", "owner", "state", "state_reason", "tags", "backends"), "text"),
    **dict.fromkeys(("created_at", "started_at", "ended_at"), "text"),
    **dict.fromkeys(("live", "target", "committed_rounds", "total_rounds", "tokens"), "int"),
    **dict.fromkeys(("tokens_per_s", "train_loss", "eval_loss", "goodput"), "float"),
    **dict.fromkeys(("bytes_up", "bytes_down"), "int"),
    **dict.fromkeys(("cost_usd", "usd_h", "budget_usd"), "float"),
    **dict.fromkeys(("cost_known", "usd_h_known"), "bool"),
    "settings": "text",
}
"""Times are ISO 8601. ``settings`` are the group settings as JSON."""


def chunks(runs: QuerySet[Run], order: Order) -> Iterator[Chunk]:
    """The rows in this order. ``runs`` are those of :func:`runs.queries.selectors.runs_for`."""
    after, seen = "", set[uuid.UUID]()
    while True:
        page, after = listing.page(runs, order, after=after, limit=PAGE)
        fresh = [run for run in page if run.pk not in seen]
        seen |= {run.pk for run in fresh}
        backends = listing.backends(fresh, whole=True)
        rows = [_row(run, backends.get(run.pk, "")) for run in fresh]
        yield {name: [row[name] for row in rows] for name in COLUMNS}
        if not after:
            return


def _row(run: Run, backends: str) -> dict[str, Any]:
    return {
        **selectors.run_header(run),
        "tags": ", ".join(texts(run.tags)),
        "backends": backends,
        "settings": json.dumps(run.group_settings, sort_keys=True),
    }
