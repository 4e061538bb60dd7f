"""Users, for administrators: add, change role, deactivate, activate, reset a password.

The link for choosing a password is only in the response to the POST. It cannot be shown again; a
reset creates another.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from dashboard.access import ROLES
from dashboard.forms.users import PersonForm
from dashboard.parameters import text_of
from runs import permissions
from runs.actions import users as service

PAGE_SIZE = 100
LINK_DAYS = settings.PASSWORD_RESET_TIMEOUT // 86_400


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def users(request: HttpRequest) -> HttpResponse:
    """The list and the form. ``?q=`` filters by name, ``?after=`` is the last name of the previous
    page."""
    actor = _administrator(request)
    if request.method != "POST":
        return _page(request, PersonForm())
    form = PersonForm(request.POST)
    if not form.is_valid():
        return _page(request, form, status=422)
    try:
        user = service.add_person(
            form.cleaned_data["name"], role=form.cleaned_data["role"], actor=actor
        )
    except ValueError as error:
        form.add_error("name", str(error))
        return _page(request, form, status=422)
    return _page(request, PersonForm(), link=_given(request, user))


@require_POST
def role(request: HttpRequest, user_id: int) -> HttpResponse:
    actor, user = _administrator(request), get_object_or_404(User, pk=user_id)
    wanted = request.POST.get("role", "")
    try:
        service.set_role(user, wanted, actor=actor)
    except ValueError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, f"{user} now has the role {wanted}.")
    return redirect("users")


@require_POST
def active(request: HttpRequest, user_id: int) -> HttpResponse:
    """Activate (``active`` is 1) or deactivate a user."""
    actor, user = _administrator(request), get_object_or_404(User, pk=user_id)
    try:
        if request.POST.get("active") == "1":
            service.activate(user, actor=actor)
            messages.success(request, f"{user} can sign in again.")
        else:
            service.deactivate(user, actor=actor)
            messages.success(request, f"{user} is signed out and can no longer sign in.")
    except ValueError as error:
        messages.error(request, str(error))
    return redirect("users")


@never_cache
@require_POST
def reset(request: HttpRequest, user_id: int) -> HttpResponse:
    """Invalidate the user's password. The response has a link for choosing a new one."""
    actor, user = _administrator(request), get_object_or_404(User, pk=user_id)
    if user.pk == actor.pk:
        messages.error(request, "Change your own password under Password in your menu.")
        return redirect("users")
    if not user.is_active:
        messages.error(request, f"{user} is deactivated. Activate the account first.")
        return redirect("users")
    try:
        service.reset_password(user, actor=actor)
    except ValueError as error:
        messages.error(request, str(error))
        return redirect("users")
    return _page(request, PersonForm(), link=_given(request, user))


def _administrator(request: HttpRequest) -> User:
    if not isinstance(request.user, User) or not permissions.has_role(request.user, "admin"):
        raise PermissionDenied("Only administrators can manage users.")
    return request.user


def _given(request: HttpRequest, user: User) -> dict[str, Any]:
    uid, token = service.link_parts(user)
    link = request.build_absolute_uri(reverse("choose-password", args=[uid, token]))
    return {"person": user, "link": link, "days": LINK_DAYS}


def _page(
    request: HttpRequest,
    form: PersonForm,
    *,
    link: dict[str, Any] | None = None,
    status: int = 200,
) -> HttpResponse:
    query, after = text_of(request.GET, "q").strip(), text_of(request.GET, "after")
    users = service.users()
    if query:
        users = users.filter(username__icontains=query)
    if after:
        users = users.filter(username__gt=after)
    rows = list(users[: PAGE_SIZE + 1])
    context = {
        "form": form,
        "given": link,
        "query": query,
        "first_page": not after,
        "next": rows[PAGE_SIZE - 1].username if len(rows) > PAGE_SIZE else "",
        "rows": [_row(user) for user in rows[:PAGE_SIZE]],
        "roles": service.ROLES,
        "now": timezone.now(),
    }
    return render(request, "account/users.html", context, status=status)


def _row(user: User) -> dict[str, Any]:
    groups = {group.name for group in user.groups.all()}
    role_name = "admin" if user.is_superuser else next((r for r in ROLES if r in groups), "")
    return {
        "person": user,
        "role": role_name,
        "runs": getattr(user, "run_count", 0),
        "waiting": user.is_active and not user.has_usable_password(),
    }
