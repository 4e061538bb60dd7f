"""State of the backends' accounts that active runs use: breakers, quota, waiting replicas."""

from __future__ import annotations

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from dashboard.parameters import text_of
from dashboard.presentation.badges import BREAKERS
from dashboard.views.access import reader
from dashboard.views.settings_access import administrator, is_administrator
from executors.registry import BACKENDS
from runs.actions import backends as actions
from runs.queries import settings_rows


@require_safe
def index(request: HttpRequest) -> HttpResponse:
    """The settings begin with what the user can change."""
    if is_administrator(request):
        return redirect("settings-credentials")
    return redirect("tokens")


@require_safe
@never_cache
def backends(request: HttpRequest) -> HttpResponse:
    reader(request)
    rows = [{**row, "look": BREAKERS[row["state"]]} for row in settings_rows.backend_rows()]
    used = {row["backend"] for row in rows}
    context = {
        "rows": rows,
        "unused": [label for name, label in BACKENDS.items() if name not in used],
        "can_change": is_administrator(request),
    }
    return render(request, "settings/backends.html", context)


@require_POST
def reset(request: HttpRequest) -> HttpResponse:
    """Close the breakers of the account ``backend`` with ``credential`` (a name, or empty)."""
    actor = administrator(request)
    backend, name = text_of(request.POST, "backend"), text_of(request.POST, "credential")
    credential = settings_rows.credential_named(name) if name else None
    if backend not in BACKENDS or (name and credential is None):
        raise Http404
    number = actions.reset_account(backend, credential, actor=actor)
    messages.success(request, f"{BACKENDS[backend]}: launches of {number} pools were reset.")
    return redirect("settings-backends")
