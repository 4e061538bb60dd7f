"""Credentials in the admin: administrators create, replace, test and delete them; never shown.

This is the only one of our tables that is edited by hand. It needs the role ``admin`` and is hidden
from other staff. Django's history records every change by field name.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters

from runs.actions.credentials import (
    InUse,
    delete_credential,
    kind_of_credential,
    test_credential,
)
from runs.admin.base import ForAdministrators
from runs.admin.credential_form import (
    ALLOWED,
    MORE,
    OPTION,
    CredentialForm,
    form_for,
    remember_secrets,
)
from runs.credentials.kinds import KINDS, STORE, Kind
from runs.models import Credential


@admin.register(Credential)
class CredentialAdmin(ForAdministrators):
    list_display = ("name", "kind_label", "holds", "test_ok", "tested_at", "changed_at")
    list_filter = ("kind", "test_ok")
    search_fields = ("name",)
    actions = ("test",)
    readonly_fields = ("holds", "last_test", "created_by", "created_at", "changed_at")

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        # Deleted one at a time, so that each refusal has its reason: see delete_view.
        return {n: a for n, a in super().get_actions(request).items() if n != "delete_selected"}

    # Columns.

    @admin.display(description="kind", ordering="kind")
    def kind_label(self, credential: Credential) -> str:
        return kind_of_credential(credential).label

    @admin.display(description="holds")
    def holds(self, credential: Credential) -> str:
        return ", ".join(credential.fields) or "nothing"

    @admin.display(description="last test")
    def last_test(self, credential: Credential) -> str:
        if credential.tested_at is None:
            return "not tested since it was changed"
        result = "works" if credential.test_ok else "does not work"
        return f"{credential.tested_at:%Y-%m-%d %H:%M} UTC: {result}. {credential.test_message}"

    # The form.

    def get_form(
        self,
        request: HttpRequest,
        obj: Credential | None = None,
        change: bool = False,
        **kwargs: Any,
    ) -> type[CredentialForm]:
        return form_for(self._kind_of(request, obj), obj)

    def get_fieldsets(self, request: HttpRequest, obj: Credential | None = None) -> Any:
        names = list(self.get_form(request, obj).base_fields)
        variables = [n for n in names if not n.startswith((OPTION, MORE, ALLOWED)) and n != "name"]
        options = [n for n in names if n.startswith((OPTION, MORE, ALLOWED))]
        sets: list[tuple[str | None, dict[str, Any]]] = [(None, {"fields": ["name"]})]
        if obj is not None:
            sets[0][1]["fields"] += ["holds", "last_test"]
        note = "Stored encrypted and never shown again. Leave a field empty to keep its value."
        sets.append(("Secrets", {"fields": variables, "description": note}))
        if options:
            sets.append(("Options, not secret", {"fields": options}))
        if obj is not None:
            sets.append(("History", {"fields": ["created_by", "created_at", "changed_at"]}))
        return sets

    def _kind_of(self, request: HttpRequest, obj: Credential | None) -> Kind:
        return KINDS[request.GET["kind"]] if obj is None else kind_of_credential(obj)

    @method_decorator(sensitive_post_parameters())
    @method_decorator(never_cache)
    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> Any:
        # Before anything can fail, so that no error page shows the input.
        remember_secrets(request.POST)
        if object_id is None and request.GET.get("kind") not in KINDS:
            return self._choose_kind(request)
        return super().changeform_view(request, object_id, form_url, extra_context)

    def _choose_kind(self, request: HttpRequest) -> HttpResponse:
        if not self.has_add_permission(request):
            raise PermissionDenied
        context = {
            **self.admin_site.each_context(request),
            "title": "Add credential",
            "opts": self.opts,
            "kinds": KINDS.values(),
        }
        return TemplateResponse(request, "admin/runs/credential/choose_kind.html", context)

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        obj = kwargs.get("obj")
        kind = self._kind_of(request, obj)
        context |= {"kind": kind, "is_store": kind.kind == STORE}
        if obj is None:
            context["title"] = f"Add credential: {kind.label}"
        return super().render_change_form(request, context, *args, **kwargs)

    def save_model(self, request: HttpRequest, obj: Credential, form: Any, change: bool) -> None:
        assert isinstance(request.user, User)
        form.store(actor=request.user)

    # Deletion.

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> Any:
        """Confirm as usual. A credential in use is not deleted; the message names its runs."""
        if request.method != "POST":
            return super().delete_view(request, object_id, extra_context)
        obj = self.get_object(request, object_id)
        if obj is not None and self.has_delete_permission(request, obj):
            pk, name = obj.pk, str(obj)
            try:
                with transaction.atomic():
                    self.log_deletions(request, Credential.objects.filter(pk=pk))
                    assert isinstance(request.user, User)
                    delete_credential(obj, actor=request.user)
            except InUse as error:
                self.message_user(request, str(error), messages.ERROR)
                return redirect("admin:runs_credential_change", pk)
            self.message_user(request, f"{name} was deleted", messages.SUCCESS)
        return redirect("admin:runs_credential_changelist")

    # Tests.

    def get_urls(self) -> list[URLPattern]:
        test = self.admin_site.admin_view(self.test_view)
        return [path("<int:pk>/test/", test, name="runs_credential_test"), *super().get_urls()]

    def test_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        obj = self.get_object(request, str(pk))
        if request.method != "POST" or obj is None or not self.has_change_permission(request, obj):
            return HttpResponse(status=405 if request.method != "POST" else 404)
        self._test(request, obj, request.POST.get("uri", "").strip())
        return redirect(reverse("admin:runs_credential_change", args=[pk]))

    @admin.action(description="Test", permissions=["change"])
    def test(self, request: HttpRequest, queryset: QuerySet[Credential]) -> None:
        for credential in queryset:
            self._test(request, credential)

    def _test(self, request: HttpRequest, credential: Credential, uri: str = "") -> None:
        tested = test_credential(credential, uri)
        self.log_change(request, credential, f"Tested: {'works' if tested.ok else 'does not work'}")
        level = messages.SUCCESS if tested.ok else messages.ERROR
        self.message_user(request, f"{credential}: {tested.message}", level)
