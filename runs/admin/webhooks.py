"""Webhooks in the admin: made, changed, tested and switched off by administrators; what was sent,
and sending it again. A secret is typed or made up; it is shown once when it was made up, and never
again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin, messages
from django.contrib.auth.models import User
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone

from runs import outbound, permissions
from runs.admin.base import ForAdministrators, Unchangeable
from runs.alerts import webhooks
from runs.alerts.rules import KINDS
from runs.models import Webhook, WebhookDelivery

if TYPE_CHECKING:
    _Form = forms.ModelForm[Webhook]
else:
    _Form = forms.ModelForm

USUAL = ("finished", "stalled", "below_quorum", "nan", "budget")


class WebhookForm(_Form):
    url = forms.URLField(
        max_length=500, assume_scheme="https", help_text="http or https. It answers 2xx."
    )
    kinds = forms.MultipleChoiceField(
        label="Tell of", choices=list(KINDS.items()), widget=forms.CheckboxSelectMultiple,
        initial=USUAL,
    )  # fmt: skip
    secret = forms.CharField(
        required=False,
        strip=True,
        max_length=120,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text="Signs what is sent: whsec_ and 24 to 64 bytes in base64. Empty: it stays as "
        "it is; for a new webhook one is made up and shown once.",
    )

    class Meta:
        model = Webhook
        fields = ("name", "url", "kinds", "enabled")

    def clean_url(self) -> str:
        url = str(self.cleaned_data["url"])
        try:
            outbound.check_url(url)
        except ValueError as error:
            raise forms.ValidationError(str(error)) from None
        return url

    def clean_secret(self) -> str:
        secret = str(self.cleaned_data["secret"])
        if secret:
            try:
                webhooks.key_of(secret)
            except webhooks.BadSecret as error:
                raise forms.ValidationError(str(error)) from None
        return secret


@admin.register(Webhook)
class WebhookAdmin(ForAdministrators):
    form = WebhookForm
    list_display = ("name", "url", "tells_of", "enabled", "created_at")
    list_filter = ("enabled",)
    actions = ("test",)

    @admin.display(description="tells of")
    def tells_of(self, hook: Webhook) -> str:
        return ", ".join(KINDS.get(kind, kind) for kind in hook.kinds)

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        assert isinstance(request.user, User)
        secret = form.cleaned_data["secret"]
        if not change:
            obj.created_by, obj.created_at = request.user, timezone.now()
            if not secret:
                secret = webhooks.new_secret()
                messages.warning(request, f"Copy the secret now, it is shown this once: {secret}")
        if secret:
            obj.sealed = webhooks.sealed_secret(secret)
        super().save_model(request, obj, form, change)

    @admin.action(description="Send a test", permissions=["change"])
    def test(self, request: HttpRequest, hooks: QuerySet[Webhook]) -> None:
        for hook in hooks:
            webhooks.send_test(hook, actor=str(request.user))
            messages.info(request, f"{hook}: a test is on its way; see its deliveries.")


@admin.register(WebhookDelivery)
class DeliveryAdmin(Unchangeable, ForAdministrators):
    list_display = ("created_at", "webhook", "kind", "state", "attempts", "status", "said")
    list_filter = ("state", "kind", "webhook")
    list_select_related = ("webhook",)
    actions = ("send_again",)

    def has_send_permission(self, request: HttpRequest) -> bool:
        return permissions.has_role(request.user, "admin")

    @admin.display(description="answer")
    def said(self, delivery: WebhookDelivery) -> str:
        return delivery.message[:80]

    @admin.action(description="Send again", permissions=["send"])
    def send_again(self, request: HttpRequest, found: QuerySet[WebhookDelivery]) -> None:
        sent = sum(webhooks.send_again(delivery) for delivery in found)
        messages.info(request, f"{sent} sent again; those that wait are tried anyway.")
