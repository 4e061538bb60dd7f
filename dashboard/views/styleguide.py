"""The style guide: every token and component on one page. Only with ``ARCHIPELAGO_DEBUG``.

``tests/browser/test_styleguide.py`` compares pictures of it, so a change of a component is visible
in a review. Lists, alerts, the failure card and the drawer are the templates of the pages, with
sample rows.
"""

from __future__ import annotations

import datetime
import uuid
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.safestring import SafeString
from django.views.decorators.http import require_safe

from archipelago.run_page_rows import Finding
from dashboard.presentation import run_rows
from dashboard.presentation.badges import LOOKS
from diloco.protocol.telemetry import PHASES
from runs.models import LogLine
from runs.queries import table
from runs.queries.failures import Failure

NOW = datetime.datetime(2026, 11, 24, 10, 20, tzinfo=datetime.UTC)
"""The time of the samples."""
RUN = uuid.UUID(int=1)
LIST_COLUMNS = ("state", "name", "tags", "replicas", "rounds", "loss", "cost", "rate", "age")
CONNECTIONS = (
    ("connecting", "Connecting"),
    ("live", "Live"),
    ("polling", "Polling every 5 s"),
    ("silent", "No worker"),
    ("offline", "Offline, last update 57 s ago"),
    ("ended", "Ended"),
)
RAMPS = ("accent", "green", "amber", "red", "violet")
STEPS = ("bg", "subtle", "border", "solid", "text")
ROLES = (
    *("bg", "surface", "raised", "sunken", "hover", "line-soft", "line", "line-strong"),
    *("text", "text-2", "text-3", "accent", "accent-hover", "focus", "danger"),
)


@require_safe
def styleguide(request: HttpRequest) -> HttpResponse:
    context = {
        "neutral": [f"n-{step}" for step in range(1, 13)],
        "ramps": [(name, [f"{name}-{step}" for step in STEPS]) for name in RAMPS],
        "roles": ROLES,
        "series": [f"r-{number}" for number in range(8)]
        + [f"p-{phase}" for phase in ("bootstrap", "start", *PHASES)],
        "sizes": (28, 20, 16, 14, 13, 12, 11),
        "weights": (400, 500, 600),
        "spaces": (4, 8, 12, 16, 24, 32, 48),
        "states": LOOKS,
        "connections": CONNECTIONS,
        "tones": ("queued", "running", "succeeded", "warning", "failed"),
        "banners": ("info", "success", "warning", "error"),
        "table": [
            ("running", "Five backends", "olga · modal, kubernetes", 0.6, "2.312", "$12.35 +"),
            ("succeeded", "Baseline, H = 90", "oscar · local", 1.0, "2.202", "$0.00"),
            (
                "failed",
                "A name that is too long for its column",
                "olga · sagemaker",
                0.1,
                "n/a",
                "-",
            ),
        ],
        **samples_of_lists(),
        **samples_of_a_run(),
        "forced": ("hover", "focus"),
    }
    return render(request, "styleguide/styleguide.html", context)


def ago(minutes: int) -> datetime.datetime:
    return NOW - datetime.timedelta(minutes=minutes)


def list_row(name: str, state: str, rounds: int, alerts: int = 0, **fields: Any) -> SafeString:
    """A row of the runs list."""
    header = {
        "id": uuid.uuid5(RUN, name),
        "name": name,
        "state": state,
        "alerts": alerts,
        "live": 4,
        "target": 4,
        "committed_rounds": rounds,
        "total_rounds": 20,
        "eval_loss": 2.312,
        "cost_usd": 12.35,
        "cost_known": True,
        "usd_h": 4.7,
        "usd_h_known": True,
        "created_at": ago(40).isoformat(),
    }
    row = run_rows.Row(header=header, address="#g-lists", place="olga · local", **fields)
    return run_rows.html(row, LIST_COLUMNS)


def alert(level: str, title: str, message: str, minutes: int, **fields: Any) -> dict[str, Any]:
    row = {"level": level, "title": title, "message": message, "opened_at": ago(minutes)}
    return row | {"place": "#g-lists", "run_name": "Five backends", "times": 1} | fields


def event(level: str, message: str, minutes: int) -> dict[str, Any]:
    row = {"source": "event", "level": level, "message": message, "at": ago(minutes)}
    return row | {"from_state": "", "to_state": "", "actor": ""}


def samples_of_lists() -> dict[str, Any]:
    reason = "3: the container was killed because it exceeded its memory limit of 24 GiB"
    return {
        "list_columns": LIST_COLUMNS,
        "list_heads": [
            column for column in table.COLUMNS if column.name in LIST_COLUMNS and not column.below
        ],
        "list_rows": [
            list_row("Five backends", "degraded", 12, alerts=2, tags=("paper",), more_tags=("a",)),
            list_row(
                "A run whose name is too long for the width of its column", "running", 7, stale=True
            ),
            list_row("Bad node", "failed", 3, why=reason),
            list_row("Baseline", "succeeded", 20, archived=True),
        ],
        "firing": [
            alert("error", "Replica lost", "replica 3 sent nothing for 3 minutes", 4, unread=True),
            alert("warning", "Budget", "82 % of the budget of $15 is spent", 12, times=3),
        ],
        "number": 2,
        "recent": [
            alert("info", "Finished", "20 of 20 rounds", 55, closed_at=ago(50), kind="finished")
        ],
    }


def finding(level: str, message: str, detail: str, replica: int | None) -> Finding:
    return Finding(
        kind="",
        level=level,
        message=message,
        detail=detail,
        replica=replica,
        pool=None,
        tab="replicas",
    )


def samples_of_a_run() -> dict[str, Any]:
    lines = (
        LogLine(at=ago(3), level="INFO", message="round 12 committed"),
        LogLine(at=ago(2), level="WARNING", message="upload retried after 2 s"),
        LogLine(at=ago(2), level="ERROR", message="CUDA out of memory"),
    )
    return {
        "run": {"id": RUN},
        "can_operate": True,
        "can_submit": True,
        "may_restart": True,
        "failure": Failure(
            message="The container was killed.\nLast state: terminated",
            at=ago(2),
            replica=3,
            attempt=2,
            cause="out_of_memory",
            exit_code=137,
            traceback='  File "train.py", line 12\ntorch.OutOfMemoryError: CUDA out of memory.',
            lines=lines,
        ),
        "findings": [
            finding("error", "replica 3 failed", "out of memory", 3),
            finding(
                "warning", "replica 1 was last in 11 of 12 rounds", "it delays a round by 8 s", 1
            ),
            finding("info", "no checkpoint yet", "", None),
        ],
        "rail_replicas": (
            (0, "running", "computing", "2.312"),
            (1, "warning", "suspect", "2.318"),
            (2, "provisioning", "starting", ""),
            (3, "failed", "failed", "2.402"),
            (4, "succeeded", "done", "2.310"),
        ),
        "replica": {
            "number": 3,
            "state": "computing",
            "round": 12,
            "step": 340,
            "loss": 2.312,
            "tokens_per_s": 14_100.0,
            "wait_fraction": 0.12,
            "cost_usd": 3.1,
            "cost_known": True,
            "restarts": 1,
            "device": "NVIDIA H100 80GB HBM3",
        },
        "pool_name": "Local",
        "backend": "local",
        "attempts": [
            {"number": 2, "created_at": ago(20)},
            {"number": 1, "created_at": ago(38), "ended_at": ago(21), "cause": "preempted"},
        ],
        "lines": lines,
        "rows": [
            event("info", "first step", 18),
            event("warning", "preempted: the machine was reclaimed", 21),
        ],
    }
