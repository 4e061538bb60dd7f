"""Permissions to run replicas on the server itself.

A local replica shares a machine with the server's keys and database and, without
``ARCHIPELAGO_LOCAL_USER``, also the server's account; custom code can read all files of that
account. The local backend therefore needs one permission, and custom code on it another.
Administrators have both. Other users get Django's permissions ``runs.use_local_backend`` and
``runs.run_custom_code_locally`` in the admin, directly or by group. ``ARCHIPELAGO_OPERATORS_LOCAL``
(``none``, ``backend`` or ``code``) grants them to all operators of a server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django.conf import settings
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User

from diloco.protocol.workload import CustomWorkload
from executors.registry import ON_SERVER
from runs import permissions
from runs.models import ReplicaPool, Run

BACKEND, CODE = "use_local_backend", "run_custom_code_locally"
GRANTS = ("none", "backend", "code")
"""Values of ``ARCHIPELAGO_OPERATORS_LOCAL``; each includes the previous one."""


def can_use_local(user: AbstractBaseUser | AnonymousUser | None) -> bool:
    return _has(user, BACKEND, ("backend", "code"))


def can_run_code_locally(user: AbstractBaseUser | AnonymousUser | None) -> bool:
    return can_use_local(user) and _has(user, CODE, ("code",))


def refused_local(user: User | None, backend: str, workload: Mapping[str, Any]) -> str:
    """Why ``user`` cannot have replicas of the workload on the backend; '' if they can."""
    if backend not in ON_SERVER:
        return ""
    if not can_use_local(user):
        return _refusal("use the local backend", BACKEND, user)
    if _has_own_code(workload) and not can_run_code_locally(user):
        return _refusal("run custom code on the local backend", CODE, user)
    return ""


def refused_by_owner(pool: ReplicaPool, run: Run) -> str:
    """Why a stored pool cannot be launched or scaled up with the current permissions."""
    return refused_local(pool.added_by or run.owner, pool.backend, run.workload)


def first_refused(
    user: User | None, backends: Iterable[str], workload: Mapping[str, Any]
) -> tuple[int, str] | None:
    """(index, reason) of the first refused pool."""
    for index, backend in enumerate(backends):
        if problem := refused_local(user, backend, workload):
            return index, problem
    return None


def _has_own_code(workload: Mapping[str, Any]) -> bool:
    """Whether a workload runs code of the user. Installing a package runs its code, too."""
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


def _refusal(action: str, permission: str, user: User | None) -> str:
    return (
        f"expected the permission to {action} (runs.{permission}), found none for {user}: an "
        "administrator can give it"
    )
