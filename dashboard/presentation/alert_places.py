"""Where an alert leads: the page that shows its cause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.urls import reverse

TABS = {
    "staleness": "rounds",
    "weights_mismatch": "rounds",
    "stalled": "rounds",
    "below_quorum": "replicas",
    "replica_lost": "replicas",
    "deadline": "replicas",
    "pool": "replicas",
    "bucket": "alerts",
    "quarantined": "alerts",
    "ingest_lag": "alerts",
}
"""Kind -> tab of the run page; other kinds are about the curves of the overview."""


def place(row: Mapping[str, Any]) -> str:
    """The address of the page about an alert of :mod:`runs.queries.alert_inbox`."""
    if row["run"] is None:
        return reverse("settings-budgets")
    if row["replica"] is not None:
        return reverse("replica", args=[row["run"], row["replica"]])
    tab = TABS.get(row["kind"])
    return reverse("run", args=[row["run"]]) + (f"?tab={tab}" if tab else "")
