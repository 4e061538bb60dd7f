"""Accounts and roles: administrators add users, change roles and deactivate accounts.

No user sets a password for another one. A new user, or one whose password was reset, gets a link
(:data:`links`) to choose a password. The link works once, expires, and is invalidated by any other
change of the account. A changed password ends the user's other sessions, because a session contains
a hash of it. API tokens stay valid; the user can revoke them.

At least one administrator who can sign in always remains (:func:`_keeping_an_administrator`). Every
change is recorded in Django's action log with its actor. Users are never deleted, because runs
belong to them; they are deactivated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from django.contrib.admin.models import ADDITION, CHANGE, LogEntry
from django.contrib.auth.hashers import UNUSABLE_PASSWORD_PREFIX
from django.contrib.auth.models import Group, User
from django.contrib.auth.tokens import PasswordResetTokenGenerator
from django.db import transaction
from django.db.models import Count, Q, QuerySet
from django.utils.encoding import force_bytes
from django.utils.http import urlsafe_base64_encode

from runs import audit

ROLES = {
    "viewer": "views every run",
    "operator": "starts runs and manages their own",
    "admin": "manages every run and all users",
}
"""Django groups and what their members can do."""


class _Links(PasswordResetTokenGenerator):
    """Django's generator; a link is also invalidated when the account is deactivated."""

    key_salt = "runs.actions.users.links"

    def _make_hash_value(self, user: User, timestamp: int) -> str:
        return f"{super()._make_hash_value(user, timestamp)}{user.is_active}"


links = _Links()


def users() -> QuerySet[User]:
    """All users by name, with their groups and number of runs."""
    return (
        User.objects.annotate(run_count=Count("runs", distinct=True))
        .prefetch_related("groups")
        .order_by("username")
    )


def administrators() -> QuerySet[User]:
    """Administrators who can sign in. A user without a password does not count."""
    active = User.objects.filter(is_active=True).exclude(password="")
    active = active.exclude(password__startswith=UNUSABLE_PASSWORD_PREFIX)
    return active.filter(Q(is_superuser=True) | Q(groups__name="admin")).distinct()


def add_person(name: str, *, role: str, actor: User) -> User:
    """Add a user without a password, who then needs a link. Raises ``ValueError``."""
    _check_role(role)
    with transaction.atomic():
        if User.objects.filter(username__iexact=name).exists():
            raise ValueError(f"expected an unused name, found {name}")
        person = User(username=name)
        person.set_unusable_password()
        person.save()
        _set_role(person, role)
        _log(actor, person, f"added as {role}", added=True)
    return person


def set_role(person: User, role: str, *, actor: User) -> None:
    """Change a user's role. Raises ``ValueError`` if no administrator would remain."""
    _check_role(role)
    with _keeping_an_administrator(f"cannot change {person} to {role}"):
        _set_role(person, role)
        _log(actor, person, f"made {role}")


def deactivate(person: User, *, actor: User) -> None:
    """Deactivate an account: sign-in, sessions, links and tokens stop working; its runs continue.

    Raises ``ValueError`` if no administrator would remain.
    """
    with _keeping_an_administrator(f"cannot deactivate {person}"):
        User.objects.filter(pk=person.pk).update(is_active=False)
        _log(actor, person, "deactivated")
    person.is_active = False


def activate(person: User, *, actor: User) -> None:
    with transaction.atomic():
        User.objects.filter(pk=person.pk).update(is_active=True)
        _log(actor, person, "activated")
    person.is_active = True


def reset_password(person: User, *, actor: User) -> None:
    """Invalidate the password and end all sessions of the user.

    Raises ``ValueError`` if no administrator with a password would remain.
    """
    with _keeping_an_administrator(f"cannot reset the password of {person}"):
        person.set_unusable_password()
        User.objects.filter(pk=person.pk).update(password=person.password)
        _log(actor, person, "password reset")


def link_parts(person: User) -> tuple[str, str]:
    """The (uid, token) of a link with which ``person`` chooses a password."""
    return urlsafe_base64_encode(force_bytes(person.pk)), links.make_token(person)


@contextlib.contextmanager
def _keeping_an_administrator(what: str) -> Iterator[None]:
    """One transaction, which is rolled back if no administrator would remain.

    The row of the admin group is the lock: otherwise two administrators who demote each other
    concurrently would both succeed.
    """
    with transaction.atomic():
        group, _ = Group.objects.get_or_create(name="admin")
        Group.objects.select_for_update().get(pk=group.pk)
        yield
        if not administrators().exists():
            raise ValueError(
                f"{what}: expected at least one active administrator with a password to remain, "
                "found none"
            )


def _set_role(person: User, role: str) -> None:
    """Set exactly this role. Administrators are also staff, which gives access to the admin."""
    person.is_staff = person.is_superuser = role == "admin"
    person.save(update_fields=["is_staff", "is_superuser"])
    person.groups.set([Group.objects.get_or_create(name=role)[0]])


def _check_role(role: str) -> None:
    if role not in ROLES:
        raise ValueError(f"expected a role of {', '.join(ROLES)}, found {role!r}")


def _log(actor: User, person: User, message: str, *, added: bool = False) -> None:
    audit.record("user.changed", actor=actor, target=f"user {person}", detail=message)
    LogEntry.objects.log_actions(
        user_id=actor.pk,
        queryset=User.objects.filter(pk=person.pk),
        action_flag=ADDITION if added else CHANGE,
        change_message=message,
        single_object=True,
    )
