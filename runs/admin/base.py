"""Base classes of the admin: read-only tables for staff, tables for administrators, and the
confirmation page of list actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseRedirect
from django.template.response import TemplateResponse

from runs import permissions

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin


class Unchangeable(ModelAdmin):
    """Rows that only the program creates, changes and deletes. Put it before the class that grants
    view permission."""

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    has_add_permission = has_delete_permission = has_change_permission


class ReadOnlyAdmin(Unchangeable):
    """A table that staff can view. Actions with ``permissions=["operate"]`` need the role admin."""

    show_full_result_count = False
    list_per_page = 50

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_view_permission(request, obj) or permissions.can_view(request.user)

    def has_operate_permission(self, request: HttpRequest) -> bool:
        return permissions.has_role(request.user, "admin")


class ForAdministrators(ModelAdmin):
    """A table for users with the role ``admin``, hidden from other staff."""

    show_full_result_count = False
    list_per_page = 50

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return permissions.has_role(request.user, "admin")

    has_module_permission = has_view_permission
    has_add_permission = has_change_permission = has_delete_permission = has_view_permission


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """The confirmation page of an action.

    ``keys`` are the affected rows, ``rows`` show them under ``head``, and ``consequences`` lists
    the consequences.
    """

    words: str
    button: str
    action: str
    origin: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    keys: Sequence[Any]
    consequences: Sequence[Mapping[str, Any]] = ()
    danger: bool = True

    def page(self, request: HttpRequest) -> TemplateResponse:
        """Render the page. The form contains the keys, so that the action affects the rows shown,
        whatever the list's filters match later."""
        filters = request.GET.urlencode()
        context = {
            **admin.site.each_context(request),
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "title": f"{self.button}?",
            "from": self.origin,
            "field": ACTION_CHECKBOX_NAME,
            "filters": filters,
            "back": f"{request.path}?{filters}" if filters else request.path,
        }
        return TemplateResponse(request, "admin/runs/confirm.html", context)


def plural(count: int, noun: str) -> str:
    """A number of things: ``1 job``, ``3 jobs``."""
    return f"{count} {noun}{'s' if count != 1 else ''}"


def confirmed(request: HttpRequest) -> bool:
    return bool(request.POST.get("confirmed"))


def back(request: HttpRequest) -> HttpResponse:
    """Redirect to the list with its filters."""
    filters = request.POST.get("filters", "")
    return HttpResponseRedirect(f"{request.path}?{filters}" if filters else request.path)
