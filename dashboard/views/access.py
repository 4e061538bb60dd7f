"""The user and the run of a view, and the outcome of an action.

A run is a 404 if the user cannot see it, and a 403 if they can only view it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse

from runs import permissions
from runs.exceptions import ActionRefused, IllegalTransition
from runs.models import Replica, Run
from runs.queries import selectors

NO_ROLE = "You have no role yet. Ask an administrator for one."


def signed_in(request: HttpRequest) -> User:
    """The user of a view that requires a sign-in, which the middleware checks."""
    assert isinstance(request.user, User)
    return request.user


def reader(request: HttpRequest) -> User:
    """The user, if they can view runs."""
    if not permissions.can_view(request.user):
        raise PermissionDenied(NO_ROLE)
    return signed_in(request)


def run_to_see(request: HttpRequest, run_id: Any) -> Run:
    return get_object_or_404(selectors.runs_for(request.user), pk=run_id)


def bare_run(request: HttpRequest, run_id: Any) -> Run:
    """The same without the annotations of a header."""
    return get_object_or_404(selectors.visible_runs(request.user), pk=run_id)


def run_to_operate(request: HttpRequest, run_id: Any) -> Run:
    run = run_to_see(request, run_id)
    if not permissions.can_operate(request.user, run):
        raise PermissionDenied("Operators can change only their own runs.")
    return run


def to_tab(run_id: Any, tab: str) -> HttpResponse:
    """Redirect to a tab of a run's page."""
    return redirect(f"{reverse('run', args=[run_id])}?tab={tab}")


def act(
    request: HttpRequest, subject: Run | Replica, name: str, action: Callable[[], bool], done: str
) -> None:
    """Call ``action`` on ``subject`` and report the outcome in a message."""
    try:
        changed = action()
    except ActionRefused as error:
        messages.error(request, f"{name}: {error}.")
    except IllegalTransition as error:
        messages.warning(request, f"{name}: {error}")
    else:
        if changed:
            messages.success(request, f"{name}: {done}.")
        else:
            messages.info(request, f"{name} is already {subject.state}.")
