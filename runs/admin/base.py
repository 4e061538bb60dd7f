"""What the tables of the admin share: most are to look at, by staff; some are administrators'; and
what is done from a list asks first."""

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
    """Rows that the program alone makes, changes and deletes; before what says who may look."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class ReadOnlyAdmin(Unchangeable):
    """To look at. ``operate`` is what an action asks for in ``permissions``."""

    show_full_result_count = False
    list_per_page = 50

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_view_permission(request, obj) or permissions.may_look(request.user)

    def has_operate_permission(self, request: HttpRequest) -> bool:
        return permissions.has_role(request.user, "admin")


class ForAdministrators(ModelAdmin):
    """Who has the role ``admin`` does everything; other staff do not see that there is any."""

    show_full_result_count = False
    list_per_page = 50

    def has_module_permission(self, request: HttpRequest) -> bool:
        return permissions.has_role(request.user, "admin")

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return permissions.has_role(request.user, "admin")

    def has_add_permission(self, request: HttpRequest) -> bool:
        return permissions.has_role(request.user, "admin")

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return permissions.has_role(request.user, "admin")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return permissions.has_role(request.user, "admin")


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked before a deed: ``keys`` are the rows' it would be done to, ``rows`` show them
    under ``head``, ``foretold`` says what will follow."""

    title: str
    words: str
    button: str
    action: str
    origin: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    keys: Sequence[Any]
    foretold: Sequence[Mapping[str, Any]] = ()
    danger: bool = True

    def page(self, request: HttpRequest) -> TemplateResponse:
        """The keys go along, so that what is done is what was shown, whatever a list's filters
        would find then."""
        filters = request.GET.urlencode()
        context = {
            **admin.site.each_context(request),
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "from": self.origin,
            "field": ACTION_CHECKBOX_NAME,
            "filters": filters,
            "back": f"{request.path}?{filters}" if filters else request.path,
        }
        return TemplateResponse(request, "admin/runs/confirm.html", context)


def confirmed(request: HttpRequest) -> bool:
    return bool(request.POST.get("confirmed"))


def back(request: HttpRequest) -> HttpResponse:
    """To the list as it was."""
    filters = request.POST.get("filters", "")
    return HttpResponseRedirect(f"{request.path}?{filters}" if filters else request.path)
