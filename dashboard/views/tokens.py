"""The user's API tokens: create, show once, revoke."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_variables
from django.views.decorators.http import require_http_methods, require_POST

from dashboard.forms.fields import StyledForm
from dashboard.views.access import signed_in
from runs import permissions
from runs.actions import api_tokens as service

INITIAL = {"scope": "read", "days": "90"}
LIFETIMES = {"30": "30 days", "90": "90 days", "365": "1 year", "": "Never"}


class TokenForm(StyledForm):
    name = forms.CharField(
        label="Name", max_length=service.NAME_LENGTH, help_text="Where the token is used."
    )
    scope = forms.ChoiceField(
        label="Access",
        choices=list(service.SCOPES.items()),
        widget=forms.RadioSelect,
        help_text="A token can never do more than your own role allows.",
    )
    days = forms.ChoiceField(label="Expires", required=False, choices=list(LIFETIMES.items()))


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@sensitive_variables("text")
def tokens(request: HttpRequest) -> HttpResponse:
    """List and create tokens. The text of a new token is only in this response, never stored."""
    if request.method != "POST":
        return _page(request, TokenForm(initial=INITIAL))
    form = TokenForm(request.POST)
    if not form.is_valid():
        return _page(request, form, status=422)
    days = form.cleaned_data["days"]
    try:
        token, text = service.issue(
            signed_in(request),
            name=form.cleaned_data["name"],
            scopes=[form.cleaned_data["scope"]],
            days=int(days) if days else None,
        )
    except ValueError as error:
        form.add_error(None, str(error))
        return _page(request, form, status=422)
    return _page(request, TokenForm(initial=INITIAL), created={"token": token, "text": text})


@require_POST
def revoke(request: HttpRequest, token_id: int) -> HttpResponse:
    token = get_object_or_404(service.tokens_of(signed_in(request)), pk=token_id)
    service.revoke(token)
    messages.success(request, f"Token {token.name} revoked.")
    return redirect("tokens")


def _page(
    request: HttpRequest,
    form: TokenForm,
    *,
    created: dict[str, Any] | None = None,
    status: int = 200,
) -> HttpResponse:
    now = timezone.now()
    context = {
        "form": form,
        "made": created,
        "tokens": [
            {
                "row": row,
                "expired": row.expires_at is not None and row.expires_at <= now,
            }
            for row in service.tokens_of(signed_in(request))
        ],
        "can_submit": permissions.can_submit(request.user),
    }
    return render(request, "account/tokens.html", context, status=status)
