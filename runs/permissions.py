"""Roles: permissions to view, submit and operate runs."""

from __future__ import annotations

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User
from django.db.models import prefetch_related_objects

from runs.models import Run, Sweep


def has_role(user: AbstractBaseUser | AnonymousUser, *roles: str) -> bool:
    """Whether an active user is in one of the groups. A superuser has every role.

    The groups are read once for each object of a user, of which every request has its own.
    """
    if not isinstance(user, User) or not user.is_active:
        return False
    if user.is_superuser:
        return True
    prefetch_related_objects([user], "groups")
    return any(group.name in roles for group in user.groups.all())


def can_view(user: AbstractBaseUser | AnonymousUser) -> bool:
    """Whether a user can view runs: every role can view all of them."""
    return has_role(user, "viewer", "operator", "admin")


def can_submit(user: AbstractBaseUser | AnonymousUser) -> bool:
    """Whether a user can create runs."""
    return has_role(user, "operator", "admin")


def can_operate(user: AbstractBaseUser | AnonymousUser, run: Run | Sweep) -> bool:
    """Whether a user can change a run, or stop a sweep: admins any, operators their own."""
    if not isinstance(user, User):
        return False
    return has_role(user, "admin", *(["operator"] if run.owner_id == user.pk else []))
