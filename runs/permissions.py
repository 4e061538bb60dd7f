"""Who can see, submit and operate what."""

from __future__ import annotations

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User

from runs.models import (
    Run,
)


def has_role(user: AbstractBaseUser | AnonymousUser, *roles: str) -> bool:
    """In one of the groups; a superuser is an admin and may all."""
    if not isinstance(user, User) or not user.is_active:
        return False
    return user.is_superuser or user.groups.filter(name__in=roles).exists()


def may_look(user: AbstractBaseUser | AnonymousUser) -> bool:
    """Everybody with a role sees all runs, somebody without one none."""
    return has_role(user, "viewer", "operator", "admin")


def may_submit(user: AbstractBaseUser | AnonymousUser) -> bool:
    return has_role(user, "operator", "admin")


def may_operate(user: AbstractBaseUser | AnonymousUser, run: Run) -> bool:
    """Admins act on any run, operators on their own."""
    if not isinstance(user, User):
        return False
    return has_role(user, "admin", *(["operator"] if run.owner_id == user.pk else []))
