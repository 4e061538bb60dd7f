"""Who may sign in, and as what: administrators add people, change roles, and let people go.

Nobody types a password for somebody else. A person who is added, or whose password is reset, gets a
link (:data:`links`) under which they choose their own; it works once, ends by itself, and dies with
any other change of the account. A changed password ends the person's other sessions, because a
session carries a hash of it; their API tokens stay, and are theirs to revoke.

At every moment one administrator who can sign in is left: :func:`_keeping_an_administrator`. What
is done is in Django's own log of actions, under the name of who did it. Nobody is deleted: runs
belong to people; who leaves is deactivated.
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
    "viewer": "looks at every run",
    "operator": "starts runs, and acts on their own",
    "admin": "acts on every run, and on people",
}
"""Django groups -> what one of them may do."""


class _Links(PasswordResetTokenGenerator):
    """Django's, and dead as soon as the account is deactivated."""

    key_salt = "runs.actions.users.links"

    def _make_hash_value(self, user: User, timestamp: int) -> str:
        return f"{super()._make_hash_value(user, timestamp)}{user.is_active}"


links = _Links()


def people() -> QuerySet[User]:
    """Everybody, by name, with their groups and the number of their runs."""
    return (
        User.objects.annotate(run_count=Count("runs", distinct=True))
        .prefetch_related("groups")
        .order_by("username")
    )


def administrators() -> QuerySet[User]:
    """Those who can sign in: somebody who has yet to choose a password is no way back in."""
    able = User.objects.filter(is_active=True).exclude(password="")
    able = able.exclude(password__startswith=UNUSABLE_PASSWORD_PREFIX)
    return able.filter(Q(is_superuser=True) | Q(groups__name="admin")).distinct()


def add_person(name: str, *, role: str, actor: User) -> User:
    """A person without a password, who has to be given a link. Raises ``ValueError``."""
    _check_role(role)
    with transaction.atomic():
        if User.objects.filter(username__iexact=name).exists():
            raise ValueError(f"expected a name nobody has, found {name}")
        person = User(username=name)
        person.set_unusable_password()
        person.save()
        _give(person, role)
        _log(actor, person, f"added as {role}", added=True)
    return person


def set_role(person: User, role: str, *, actor: User) -> None:
    """Raises ``ValueError`` if it would leave no administrator."""
    _check_role(role)
    with _keeping_an_administrator(f"{person} is to become {role}"):
        _give(person, role)
        _log(actor, person, f"made {role}")


def deactivate(person: User, *, actor: User) -> None:
    """They cannot sign in, and their sessions, links and tokens open nothing; their runs go on.

    Raises ``ValueError`` if it would leave no administrator.
    """
    with _keeping_an_administrator(f"{person} is to be deactivated"):
        User.objects.filter(pk=person.pk).update(is_active=False)
        _log(actor, person, "deactivated")
    person.is_active = False


def activate(person: User, *, actor: User) -> None:
    with transaction.atomic():
        User.objects.filter(pk=person.pk).update(is_active=True)
        _log(actor, person, "activated")
    person.is_active = True


def reset_password(person: User, *, actor: User) -> None:
    """The old password opens nothing from now on, and every session of theirs has ended.

    Raises ``ValueError`` if it would leave no administrator with a password.
    """
    with _keeping_an_administrator(f"the password of {person} is to be reset"):
        person.set_unusable_password()
        User.objects.filter(pk=person.pk).update(password=person.password)
        _log(actor, person, "password reset")


def link_parts(person: User) -> tuple[str, str]:
    """(uid, token) of a link under which ``person`` chooses a password."""
    return urlsafe_base64_encode(force_bytes(person.pk)), links.make_token(person)


@contextlib.contextmanager
def _keeping_an_administrator(what: str) -> Iterator[None]:
    """One transaction; undone if nobody would be left who can administrate.

    The row of the admin group is the lock: two administrators who demote each other at the same
    moment would otherwise both succeed.
    """
    with transaction.atomic():
        group, _ = Group.objects.get_or_create(name="admin")
        Group.objects.select_for_update().get(pk=group.pk)
        yield
        if not administrators().exists():
            raise ValueError(
                f"{what}: expected at least one active administrator with a password to be left, "
                "found none"
            )


def _give(person: User, role: str) -> None:
    """The role alone; administrators are staff as well, so that they may open the admin."""
    person.is_staff = person.is_superuser = role == "admin"
    person.save(update_fields=["is_staff", "is_superuser"])
    person.groups.set([Group.objects.get_or_create(name=role)[0]])


def _check_role(role: str) -> None:
    if role not in ROLES:
        raise ValueError(f"expected a role of {', '.join(ROLES)}, found {role!r}")


def _log(actor: User, person: User, words: str, *, added: bool = False) -> None:
    audit.record("user.changed", actor=actor, target=f"user {person}", detail=words)
    LogEntry.objects.log_actions(
        user_id=actor.pk,
        queryset=User.objects.filter(pk=person.pk),
        action_flag=ADDITION if added else CHANGE,
        change_message=words,
        single_object=True,
    )
