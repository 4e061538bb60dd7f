"""People, for administrators: add, change role, let go, take back, reset a password.

The link under which somebody chooses a password is in the answer to the POST alone. It cannot be
asked for again; resetting makes another.
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
from dashboard.forms.people import PersonForm
from runs import permissions
from runs.actions import users as service

PAGE_SIZE = 100
LINK_DAYS = settings.PASSWORD_RESET_TIMEOUT // 86_400


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def people(request: HttpRequest) -> HttpResponse:
    """``?q=`` narrows by name, ``?after=`` is the last name of the page before."""
    actor = _administrator(request)
    if request.method != "POST":
        return _page(request, PersonForm())
    form = PersonForm(request.POST)
    if not form.is_valid():
        return _page(request, form, status=422)
    try:
        person = service.add_person(
            form.cleaned_data["name"], role=form.cleaned_data["role"], actor=actor
        )
    except ValueError as error:
        form.add_error("name", str(error))
        return _page(request, form, status=422)
    return _page(request, PersonForm(), given=_given(request, person))


@require_POST
def role(request: HttpRequest, person_id: int) -> HttpResponse:
    actor, person = _administrator(request), get_object_or_404(User, pk=person_id)
    wanted = request.POST.get("role", "")
    try:
        service.set_role(person, wanted, actor=actor)
    except ValueError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, f"{person} is {wanted} now.")
    return redirect("people")


@require_POST
def active(request: HttpRequest, person_id: int) -> HttpResponse:
    """``active`` 1 or 0."""
    actor, person = _administrator(request), get_object_or_404(User, pk=person_id)
    try:
        if request.POST.get("active") == "1":
            service.activate(person, actor=actor)
            messages.success(request, f"{person} may sign in again.")
        else:
            service.deactivate(person, actor=actor)
            messages.success(request, f"{person} is signed out and cannot sign in.")
    except ValueError as error:
        messages.error(request, str(error))
    return redirect("people")


@never_cache
@require_POST
def reset(request: HttpRequest, person_id: int) -> HttpResponse:
    """Their password opens nothing any more; the answer has a link to choose another."""
    actor, person = _administrator(request), get_object_or_404(User, pk=person_id)
    if person.pk == actor.pk:
        messages.error(request, "Your own password you change under Password, in your menu.")
        return redirect("people")
    if not person.is_active:
        messages.error(request, f"{person} cannot sign in; activate the account first.")
        return redirect("people")
    try:
        service.reset_password(person, actor=actor)
    except ValueError as error:
        messages.error(request, str(error))
        return redirect("people")
    return _page(request, PersonForm(), given=_given(request, person))


def _administrator(request: HttpRequest) -> User:
    if not isinstance(request.user, User) or not permissions.has_role(request.user, "admin"):
        raise PermissionDenied("Administrators look after people.")
    return request.user


def _given(request: HttpRequest, person: User) -> dict[str, Any]:
    uid, token = service.link_parts(person)
    link = request.build_absolute_uri(reverse("choose-password", args=[uid, token]))
    return {"person": person, "link": link, "days": LINK_DAYS}


def _page(
    request: HttpRequest,
    form: PersonForm,
    *,
    given: dict[str, Any] | None = None,
    status: int = 200,
) -> HttpResponse:
    # No name has a NUL character, and PostgreSQL cannot be asked for one.
    query, after = (request.GET.get(name, "").replace("\0", "") for name in ("q", "after"))
    query = query.strip()
    found = service.people()
    if query:
        found = found.filter(username__icontains=query)
    if after:
        found = found.filter(username__gt=after)
    rows = list(found[: PAGE_SIZE + 1])
    context = {
        "form": form,
        "given": given,
        "query": query,
        "first_page": not after,
        "next": rows[PAGE_SIZE - 1].username if len(rows) > PAGE_SIZE else "",
        "rows": [_row(person) for person in rows[:PAGE_SIZE]],
        "roles": service.ROLES,
        "now": timezone.now(),
    }
    return render(request, "account/people.html", context, status=status)


def _row(person: User) -> dict[str, Any]:
    groups = {group.name for group in person.groups.all()}
    held = "admin" if person.is_superuser else next((r for r in ROLES if r in groups), "")
    return {
        "person": person,
        "role": held,
        "runs": getattr(person, "run_count", 0),
        "waiting": person.is_active and not person.has_usable_password(),
    }
