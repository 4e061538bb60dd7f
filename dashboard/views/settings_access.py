"""Access to the pages of ``/settings``, and refused values on their forms."""

from __future__ import annotations

from django import forms
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

from dashboard.views.access import signed_in
from runs import permissions
from runs.exceptions import InvalidRun


def administrator(request: HttpRequest) -> User:
    """The user of a page that needs the role admin."""
    if not permissions.has_role(request.user, "admin"):
        raise PermissionDenied("Only administrators can change these settings.")
    return signed_in(request)


def is_administrator(request: HttpRequest) -> bool:
    return permissions.has_role(request.user, "admin")


def add_problem(form: forms.BaseForm, error: InvalidRun) -> None:
    """Show a refused value at its field, or above the form."""
    field = error.field if error.field in form.fields else None
    form.add_error(field, error.message)
