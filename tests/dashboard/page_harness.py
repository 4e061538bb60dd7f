"""Clients of the five roles that every view is tested with, and helpers for pages."""

from __future__ import annotations

import html
import re
from typing import Any

from django.test import Client

from runs.models import Run
from tests.browser import seed
from tests.browser.seed import user

KINDS = ("anonymous", "viewer", "owner", "stranger", "admin")
"""``owner`` and ``stranger`` are operators; the run belongs to the owner."""


def make_user(kind: str) -> Any:
    return user(kind, {"owner": "operator", "stranger": "operator"}.get(kind, kind))


def client_for(kind: str, owner: Any, **options: Any) -> Client:
    client = Client(**options)
    if kind != "anonymous":
        client.force_login(owner if kind == "owner" else make_user(kind))
    return client


def make_runs(owner: Any, count: int, *, committed: int = 1, **options: Any) -> list[Run]:
    """Runs of one replica each: r0, r1, ..."""
    return [
        seed.run(owner, name=f"r{n}", replicas=1, committed=committed, **options)
        for n in range(count)
    ]


def messages_of(response: Any) -> str:
    """The messages of a page."""
    return " ".join(str(m) for m in response.context["messages"])


def errors_at(page: str, field: str) -> str:
    """The errors below a field of a form, as the page has them."""
    found = re.search(rf'data-errors-for="{re.escape(field)}">(.*?)</ul>', page, re.DOTALL)
    return html.unescape(found[1]) if found else ""


def pool_fields(**changes: str) -> dict[str, str]:
    """Return the form fields that a browser posts for one more local replica."""
    fields = {
        "backend": "local",
        "hardware": "local:cpu",
        "count": "1",
        "credential": "",
        "region": "",
        "timeout_s": "",
        "image": "",
        "price_usd_h": "",
    }
    return {f"pools.0.{name}": value for name, value in (fields | changes).items()}
