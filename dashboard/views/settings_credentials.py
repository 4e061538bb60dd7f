"""Credentials, for administrators: add, rotate, test, delete. Secrets are never shown again.

The form is that of the administration (:mod:`runs.admin.credential_form`): write-only, with the
fields of the kind; an empty field keeps the stored value.
"""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from dashboard.access import or_404
from dashboard.forms import credentials as forms
from dashboard.views.settings_access import administrator
from runs.actions import credentials as actions
from runs.admin.credential_form import remember_secrets
from runs.models import Credential
from runs.queries import settings_rows


@require_safe
@never_cache
def credentials(request: HttpRequest) -> HttpResponse:
    """The list, and the kinds of which one can be added."""
    administrator(request)
    context = {
        "credentials": settings_rows.credential_rows(),
        "kinds": actions.kinds().values(),
    }
    return render(request, "settings/credentials.html", context)


@never_cache
@sensitive_post_parameters()
@require_http_methods(["GET", "HEAD", "POST"])
def add(request: HttpRequest, kind: str) -> HttpResponse:
    administrator(request)
    if kind not in actions.kinds():
        raise Http404
    return _form(request, actions.kinds()[kind], None)


@never_cache
@sensitive_post_parameters()
@require_http_methods(["GET", "HEAD", "POST"])
def credential(request: HttpRequest, credential_id: int) -> HttpResponse:
    """Change a credential: a new value rotates a secret, without ending jobs that have the old."""
    administrator(request)
    found = or_404(settings_rows.credential(credential_id))
    return _form(request, actions.kind_of_credential(found), found)


def _form(request: HttpRequest, kind: Any, found: Credential | None) -> HttpResponse:
    actor = administrator(request)
    posted = request.POST if request.method == "POST" else None
    if posted is not None:
        remember_secrets(posted)  # before anything can fail: no error page shows the input
    form = forms.credential_form(kind, found, posted)
    if posted is not None and form.is_valid():
        saved = form.store(actor=actor)
        messages.success(request, f"Credential {saved} saved. Test it before it is used.")
        return redirect("settings-credential", credential_id=saved.pk)
    rows = settings_rows.credential_rows([found]) if found else []
    context = {
        "form": form,
        "kind": kind,
        "credential": rows[0] if rows else None,
        "used_by": actions.used_by(found)[: actions.NAMES_SHOWN] if found else [],
        "groups": forms.groups(form),
        "is_store": kind.kind == "store",
    }
    status = 422 if form.errors else 200
    return render(request, "settings/credential.html", context, status=status)


@require_POST
def test(request: HttpRequest, credential_id: int) -> HttpResponse:
    """Check the identity at the backend, or the operations in the bucket ``uri``."""
    administrator(request)
    found = or_404(settings_rows.credential(credential_id))
    tested = actions.test_credential(found, request.POST.get("uri", "").strip()[:500])
    (messages.success if tested.ok else messages.error)(request, f"{found}: {tested.message}")
    return redirect("settings-credential", credential_id=found.pk)


@require_POST
def delete(request: HttpRequest, credential_id: int) -> HttpResponse:
    actor, found = administrator(request), or_404(settings_rows.credential(credential_id))
    name = str(found)
    try:
        actions.delete_credential(found, actor=actor)
    except actions.InUse as error:
        messages.error(request, str(error))
        return redirect("settings-credential", credential_id=credential_id)
    messages.success(request, f"Credential {name} deleted.")
    return redirect("settings-credentials")
