"""A person's own tokens: made, shown once, revoked."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_variables
from django.views.decorators.http import require_http_methods, require_POST

from dashboard.forms.fields import dress
from dashboard.presentation import formats
from runs import permissions
from runs.actions import api_tokens as service

LIFETIMES = {"30": "30 days", "90": "90 days", "365": "1 year", "": "Never"}


class TokenForm(forms.Form):
    name = forms.CharField(
        label="Name", max_length=service.NAME_LENGTH, help_text="Where it will be used."
    )
    scope = forms.ChoiceField(
        label="May",
        choices=list(service.SCOPES.items()),
        widget=forms.RadioSelect,
        help_text="Never more than your own role allows when it is used.",
    )
    days = forms.ChoiceField(label="Expires", required=False, choices=list(LIFETIMES.items()))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        dress(self)


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@sensitive_variables("text")
def tokens(request: HttpRequest) -> HttpResponse:
    """The text of a new token is in the answer to the POST alone: it is stored nowhere."""
    assert isinstance(request.user, User)
    if request.method != "POST":
        return _page(request, TokenForm(initial={"scope": "read", "days": "90"}))
    form = TokenForm(request.POST)
    if not form.is_valid():
        return _page(request, form, status=422)
    days = form.cleaned_data["days"]
    try:
        token, text = service.issue(
            request.user,
            name=form.cleaned_data["name"],
            scopes=[form.cleaned_data["scope"]],
            days=int(days) if days else None,
        )
    except ValueError as error:
        form.add_error(None, str(error))
        return _page(request, form, status=422)
    fresh = TokenForm(initial={"scope": "read", "days": "90"})
    return _page(request, fresh, made={"token": token, "text": text})


@require_POST
def revoke(request: HttpRequest, token_id: int) -> HttpResponse:
    assert isinstance(request.user, User)
    token = get_object_or_404(service.tokens_of(request.user), pk=token_id)
    service.revoke(token)
    messages.success(request, f"{token.name} was revoked; it opens nothing any more.")
    return redirect("tokens")


def _page(
    request: HttpRequest,
    form: TokenForm,
    *,
    made: dict[str, Any] | None = None,
    status: int = 200,
) -> HttpResponse:
    assert isinstance(request.user, User)
    now = timezone.now()
    context = {
        "form": form,
        "made": made,
        "tokens": [
            {
                "row": row,
                "expired": row.expires_at is not None and row.expires_at <= now,
                "made": _ago(row.created_at, now),
                "used": _ago(row.last_used_at, now),
            }
            for row in service.tokens_of(request.user)
        ],
        "may_submit": permissions.may_submit(request.user),
    }
    return render(request, "account/tokens.html", context, status=status)


def _ago(at: datetime | None, now: datetime) -> str:
    if at is None:
        return ""
    age = formats.age((now - at).total_seconds())
    return "just now" if age == "now" else f"{age} ago"
