"""Webhooks in the admin: administrators create, change, test and disable them, and see and repeat
deliveries. A secret is entered or generated; a generated one is shown once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin, messages
from django.contrib.auth.models import User
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone

from runs.actions.webhooks import USUAL, check_webhook
from runs.admin.base import ForAdministrators, Unchangeable
from runs.alerts import webhooks
from runs.alerts.rules import KINDS
from runs.exceptions import InvalidRun
from runs.models import Webhook, WebhookDelivery

if TYPE_CHECKING:
    _Form = forms.ModelForm[Webhook]
else:
    _Form = forms.ModelForm


class WebhookForm(_Form):
    url = forms.URLField(
        max_length=500,
        assume_scheme="https",
        help_text="An http or https address that answers with status 2xx.",
    )
    kinds = forms.MultipleChoiceField(
        label="Notify about",
        choices=list(KINDS.items()),
        widget=forms.CheckboxSelectMultiple,
        initial=USUAL,
    )
    secret = forms.CharField(
        required=False,
        strip=True,
        max_length=120,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text="Signs deliveries: whsec_ and 24 to 64 bytes in base64. Leave empty to keep the "
        "current one; for a new webhook a secret is generated and shown once.",
    )

    class Meta:
        model = Webhook
        fields = ("name", "url", "kinds", "enabled")

    def clean(self) -> dict[str, Any]:
        super().clean()
        given = self.cleaned_data
        if not self.errors:
            try:
                check_webhook(given["name"], given["url"], given["kinds"], given["secret"])
            except InvalidRun as error:
                self.add_error(error.field, error.message)
        return given


@admin.register(Webhook)
class WebhookAdmin(ForAdministrators):
    form = WebhookForm
    list_display = ("name", "url", "notifies_about", "enabled", "created_at")
    list_filter = ("enabled",)
    actions = ("test",)

    @admin.display(description="notifies about")
    def notifies_about(self, hook: Webhook) -> str:
        return ", ".join(KINDS.get(kind, kind) for kind in hook.kinds)

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        assert isinstance(request.user, User)
        secret = form.cleaned_data["secret"]
        if not change:
            obj.created_by, obj.created_at = request.user, timezone.now()
            if not secret:
                secret = webhooks.new_secret()
                messages.warning(request, f"Copy the secret now. It won't be shown again: {secret}")
        if secret:
            obj.sealed = webhooks.sealed_secret(secret)
        super().save_model(request, obj, form, change)

    @admin.action(description="Send a test", permissions=["change"])
    def test(self, request: HttpRequest, hooks: QuerySet[Webhook]) -> None:
        for hook in hooks:
            webhooks.send_test(hook, actor=str(request.user))
            messages.info(request, f"{hook}: test sent; see its deliveries")


@admin.register(WebhookDelivery)
class DeliveryAdmin(Unchangeable, ForAdministrators):
    list_display = ("created_at", "webhook", "kind", "state", "attempts", "status", "answer")
    list_filter = ("state", "kind", "webhook")
    list_select_related = ("webhook",)
    actions = ("send_again",)

    @admin.display(description="answer")
    def answer(self, delivery: WebhookDelivery) -> str:
        return delivery.message[:80]

    @admin.action(description="Send again", permissions=["view"])
    def send_again(self, request: HttpRequest, deliveries: QuerySet[WebhookDelivery]) -> None:
        sent = sum(webhooks.send_again(delivery) for delivery in deliveries)
        messages.info(request, f"{sent} sent again; pending ones are retried automatically")
