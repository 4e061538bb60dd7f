"""Who can run replicas on the server itself.

A local replica shares a machine with the server's keys and database, and without
``ARCHIPELAGO_LOCAL_USER`` its user as well; custom code can read whatever that user can. So the
local backend has a permission of its own, and custom code on it another. Administrators have both.
Others have them by Django's permissions ``runs.use_local_backend`` and
``runs.run_custom_code_locally``, given to a user or group in the administration, or, for all
operators of a server, by ``ARCHIPELAGO_OPERATORS_LOCAL`` (``none``, ``backend`` or ``code``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django.conf import settings
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User

from diloco.protocol.workload import CustomWorkload
from runs import permissions
from runs.models import ReplicaPool, Run

LOCAL = "local"
BACKEND, CODE = "use_local_backend", "run_custom_code_locally"
GRANTS = ("none", "backend", "code")
"""Values of ``ARCHIPELAGO_OPERATORS_LOCAL``; each contains the one before."""


def can_use_local(user: AbstractBaseUser | AnonymousUser | None) -> bool:
    return _has(user, BACKEND, ("backend", "code"))


def can_run_code_locally(user: AbstractBaseUser | AnonymousUser | None) -> bool:
    return can_use_local(user) and _has(user, CODE, ("code",))


def refused_local(user: User | None, backend: str, workload: Mapping[str, Any]) -> str:
    """Why ``user`` cannot have replicas of the workload on the backend; '' if they can."""
    if backend != LOCAL:
        return ""
    if not can_use_local(user):
        return _refusal("use the local backend", BACKEND, user)
    if _has_own_code(workload) and not can_run_code_locally(user):
        return _refusal("run custom code on the local backend", CODE, user)
    return ""


def refused_by_owner(pool: ReplicaPool, run: Run) -> str:
    """Why a stored pool cannot be launched or grow with the permissions of today."""
    return refused_local(pool.added_by or run.owner, pool.backend, run.workload)


def first_refused(
    user: User | None, backends: Iterable[str], workload: Mapping[str, Any]
) -> tuple[int, str] | None:
    """(index, reason) of the first pool that is refused."""
    for index, backend in enumerate(backends):
        if problem := refused_local(user, backend, workload):
            return index, problem
    return None


def _has_own_code(workload: Mapping[str, Any]) -> bool:
    """A function of a user, or packages: installing one runs its code."""
    return workload.get("kind") == CustomWorkload.kind or bool(
        workload.get("requirements") or workload.get("trust_remote_code")
    )


def _has(
    user: AbstractBaseUser | AnonymousUser | None, permission: str, grants: tuple[str, ...]
) -> bool:
    if not isinstance(user, User) or not user.is_active:
        return False
    if permissions.has_role(user, "admin") or user.has_perm(f"runs.{permission}"):
        return True
    return settings.OPERATORS_LOCAL in grants and permissions.has_role(user, "operator")


def _refusal(what: str, permission: str, user: User | None) -> str:
    return (
        f"expected the permission to {what} (runs.{permission}), found none for {user}: an "
        "administrator can give it"
    )
