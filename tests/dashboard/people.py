"""The five kinds of people every view is tested with."""

from __future__ import annotations

from typing import Any

from django.test import Client

from runs.models import Run
from tests.browser import seed
from tests.browser.seed import user

KINDS = ("anonymous", "viewer", "owner", "stranger", "admin")
"""``owner`` and ``stranger`` are operators; the run is the owner's."""


def client_for(kind: str, owner: Any, **options: Any) -> Client:
    client = Client(**options)
    if kind != "anonymous":
        role = {"owner": "operator", "stranger": "operator"}.get(kind, kind)
        client.force_login(owner if kind == "owner" else user(kind, role))
    return client


def some(owner: Any, count: int, *, committed: int = 1, **options: Any) -> list[Run]:
    """Runs of one replica each: r0, r1, ..."""
    return [
        seed.run(owner, name=f"r{n}", replicas=1, committed=committed, **options)
        for n in range(count)
    ]


def told(answer: Any) -> str:
    """The messages of a page."""
    return " ".join(str(m) for m in answer.context["messages"])
