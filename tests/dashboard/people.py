"""The five kinds of people every view is tested with."""

from __future__ import annotations

from typing import Any

from django.test import Client

from tests.browser.seed import user

KINDS = ("anonymous", "viewer", "owner", "stranger", "admin")
"""``owner`` and ``stranger`` are operators; the run is the owner's."""


def client_for(kind: str, owner: Any, **options: Any) -> Client:
    client = Client(**options)
    if kind != "anonymous":
        role = {"owner": "operator", "stranger": "operator"}.get(kind, kind)
        client.force_login(owner if kind == "owner" else user(kind, role))
    return client
