"""Information about the server: backends, group settings, and the caller."""

from __future__ import annotations

import dataclasses
from typing import Any

from django.http import HttpRequest
from ninja import Router

import diloco
from archipelago import rows as shared
from dashboard.access import role_of
from dashboard.api import rows
from dashboard.api.auth import caller, reader
from dashboard.api.types import responses
from diloco.protocol.settings import setting_fields
from runs import permissions
from runs.backends.executors import catalogue, usable_backends
from runs.queries import named

router = Router(tags=["server"])
SERVER = diloco.__version__


@router.get("/me", response=responses(shared.Me, but=(403, 404, 409, 413)))
def me(request: HttpRequest) -> Any:
    """The user that the token or the session belongs to."""
    who = caller(request)
    return {
        "user": who.user.get_username(),
        "role": role_of(who.user),
        "scopes": sorted(who.scopes),
        "version": SERVER,
    }


@router.get("/backends", response=responses(list[rows.Backend], but=(404, 409, 413)))
def backends(request: HttpRequest) -> Any:
    """Backends with their hardware and prices (USD per hour; null: not known). Only users who can
    submit runs see the names of the credentials."""
    user = reader(request)
    names: dict[str, list[str]] = {}
    if permissions.can_submit(user):
        for credential in named.credentials():
            names.setdefault(credential.kind, []).append(credential.name)
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
    """The schema of the group settings. The form and ``group.json`` are built from it too."""
    reader(request)
    return [dataclasses.asdict(spec) for spec in setting_fields()]
