"""What this server has: backends, the group settings, and who asks."""

from __future__ import annotations

import dataclasses
from typing import Any

from django.http import HttpRequest
from ninja import Router

from dashboard.access import role_of
from dashboard.api import rows
from dashboard.api.auth import caller, reader
from dashboard.api.types import responses
from diloco.protocol.settings import setting_fields
from runs import permissions
from runs.backends.executors import catalogue, usable_backends
from runs.models import Credential

router = Router(tags=["server"])
SERVER = "0.1.0"


@router.get("/me", response=responses(rows.Me, but=(403, 404, 409, 413)))
def me(request: HttpRequest) -> Any:
    """Who the token, or the session, belongs to."""
    who = caller(request)
    return {
        "user": who.user.get_username(),
        "role": role_of(who.user),
        "scopes": sorted(who.scopes),
        "version": SERVER,
    }


@router.get("/backends", response=responses(list[rows.Backend], but=(404, 409, 413)))
def backends(request: HttpRequest) -> Any:
    """Backends, their hardware and prices (USD per hour; null: not known), and the names of
    credentials for them, which only those who may submit are told."""
    user = reader(request)
    names: dict[str, list[str]] = {}
    if permissions.may_submit(user):
        for kind, name in Credential.objects.order_by("name").values_list("kind", "name"):
            names.setdefault(kind, []).append(name)
    return [
        {
            "name": name,
            "label": label,
            "hardware": [dataclasses.asdict(h) for h in catalogue().of(name)],
            "credentials": names.get(name, []),
        }
        for name, label in usable_backends().items()
    ]


@router.get("/settings", response=responses(list[rows.Setting], but=(404, 409, 413)))
def settings(request: HttpRequest) -> Any:
    """The schema of the group settings: the form and ``group.json`` come from it as well."""
    reader(request)
    return [dataclasses.asdict(spec) for spec in setting_fields()]
