"""A run for a view: 404 for what somebody may not see, 403 for what they may only watch."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.shortcuts import get_object_or_404

from runs import permissions
from runs.models import Run
from runs.queries import selectors


def run_to_see(request: HttpRequest, run_id: Any) -> Run:
    return get_object_or_404(selectors.runs_for(request.user), pk=run_id)


def run_to_operate(request: HttpRequest, run_id: Any) -> Run:
    run = run_to_see(request, run_id)
    if not permissions.may_operate(request.user, run):
        raise PermissionDenied("Operators act on their own runs, administrators on any.")
    return run
