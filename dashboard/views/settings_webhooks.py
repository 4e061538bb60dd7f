"""Webhooks, for administrators: add, change, test, delete, and the list of deliveries."""

from __future__ import annotations

import uuid

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST

from dashboard.access import or_404
from dashboard.forms.settings import WebhookForm
from dashboard.views.settings_access import add_problem, administrator
from runs.actions import webhooks as actions
from runs.alerts.rules import KINDS
from runs.exceptions import InvalidRun
from runs.models import Webhook
from runs.queries import settings_rows


@never_cache
@sensitive_post_parameters("secret")
@require_http_methods(["GET", "HEAD", "POST"])
def webhooks(request: HttpRequest) -> HttpResponse:
    """The list, and a form for another. A generated secret is only in the response to the POST."""
    actor = administrator(request)
    if request.method != "POST":
        return _page(request, WebhookForm())
    form = WebhookForm(request.POST)
    if form.is_valid():
        try:
            hook, secret = actions.save_webhook(**form.cleaned_data, actor=actor)
        except InvalidRun as error:
            add_problem(form, error)
        else:
            given = None if form.cleaned_data["secret"] else {"hook": hook, "secret": secret}
            messages.success(request, f"Webhook {hook} added.")
            return _page(request, WebhookForm(), given=given)
    return _page(request, form, status=422)


@never_cache
@sensitive_post_parameters("secret")
@require_http_methods(["GET", "HEAD", "POST"])
def webhook(request: HttpRequest, webhook_id: int) -> HttpResponse:
    """Change a webhook."""
    actor, hook = administrator(request), or_404(settings_rows.webhook(webhook_id))
    initial = {name: getattr(hook, name) for name in ("name", "url", "kinds", "enabled")}
    form = WebhookForm(request.POST if request.method == "POST" else None, initial=initial)
    if request.method == "POST" and form.is_valid():
        try:
            actions.save_webhook(**form.cleaned_data, actor=actor, hook=hook)
        except InvalidRun as error:
            add_problem(form, error)
        else:
            messages.success(request, f"Webhook {hook} saved.")
            return redirect("settings-webhooks")
    return _page(request, form, changed=hook, status=422 if form.errors else 200)


@require_POST
def test(request: HttpRequest, webhook_id: int) -> HttpResponse:
    actor, hook = administrator(request), or_404(settings_rows.webhook(webhook_id))
    actions.send_test(hook, actor=actor)
    messages.info(request, f"Test sent to {hook}. Its result appears under Deliveries.")
    return redirect("settings-webhook", webhook_id=hook.pk)


@require_POST
def delete(request: HttpRequest, webhook_id: int) -> HttpResponse:
    actor, hook = administrator(request), or_404(settings_rows.webhook(webhook_id))
    actions.delete_webhook(hook, actor=actor)
    messages.success(request, f"Webhook {hook} deleted.")
    return redirect("settings-webhooks")


@require_POST
def repeat(request: HttpRequest, delivery_id: uuid.UUID) -> HttpResponse:
    """Send a finished delivery again."""
    actor, delivery = administrator(request), or_404(settings_rows.delivery(delivery_id))
    if actions.send_again(delivery, actor=actor):
        messages.info(request, "Sent again. Its result appears here.")
    else:
        messages.info(request, "It is still waiting, and retried automatically.")
    return redirect("settings-webhook", webhook_id=delivery.webhook_id)


def _page(
    request: HttpRequest,
    form: WebhookForm,
    *,
    changed: Webhook | None = None,
    given: dict[str, object] | None = None,
    status: int = 200,
) -> HttpResponse:
    rows = settings_rows.webhook_rows()
    context = {
        "form": form,
        "changed": changed,
        "given": given,
        "hooks": [{**row, "titles": [KINDS.get(k, k) for k in row["kinds"]]} for row in rows],
        "deliveries": settings_rows.delivery_rows(changed, limit=20),
    }
    return render(request, "settings/webhooks.html", context, status=status)
