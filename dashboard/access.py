"""The role a page names in its menu. What a role may do is decided in
:mod:`runs.queries.selectors`."""

from __future__ import annotations

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User

ROLES = ("admin", "operator", "viewer")
"""Django groups, strongest first."""


def role_of(user: AbstractBaseUser | AnonymousUser) -> str:
    """The strongest role of ``user``; '' for somebody without any. A superuser is an admin."""
    if not isinstance(user, User):
        return ""
    if user.is_superuser:
        return "admin"
    groups = set(user.groups.values_list("name", flat=True))
    return next((role for role in ROLES if role in groups), "")
