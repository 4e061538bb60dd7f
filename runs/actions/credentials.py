"""Stores, tests and deletes credentials. The caller checks permissions."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import ProtectedError, Q
from django.utils import timezone

from diloco.store.base import StoreDenied, StoreError, StoreUnavailable
from diloco.store.credentials import family_of
from diloco.store.open import open_store
from executors.backend import Variable
from executors.base import ExecutorError
from executors.loading import wait_loaded
from executors.registry import BACKENDS
from runs import audit, redaction
from runs.backends import circuit_breaker
from runs.backends.executors import executor_of
from runs.backends.parallel_calls import CallTimeout, call
from runs.credentials import sts
from runs.credentials.kinds import (
    KINDS,
    ROLE_ARN,
    STORE,
    TEST_URI,
    Kind,
    check_store,
    is_secret,
    kind_of,
)
from runs.credentials.replica_env import store_environment
from runs.credentials.vault import DecryptionError, open_credential, seal
from runs.models import Credential, EvaluationPlan, ReplicaPool, Run
from runs.redaction import clean_text
from runs.submit.bucket_check import missing_operation

NAMES_SHOWN = 5
PATIENCE_S = 20.0
"""Timeout of a test: an endpoint that never answers holds no worker of the server for longer."""


class InUse(ValueError):
    """The credential is still used by a run."""


@dataclass(frozen=True, kw_only=True)
class Tested:
    """A test result. ``message`` is the backend's identity or error message."""

    ok: bool
    message: str


def kinds() -> Mapping[str, Kind]:
    """The kinds of which a credential can be added, by key."""
    return KINDS


def kind_of_credential(credential: Credential) -> Kind:
    """The credential's kind; a generic one for an unknown kind, so that it can be replaced."""
    return kind_of(credential) or Kind(
        key=credential.kind,
        label=credential.kind,
        backend=credential.kind,
        variables=tuple(Variable(name=name, label=name) for name in credential.fields),
    )


def save_credential(
    credential: Credential,
    *,
    typed: Mapping[str, str],
    cleared: Collection[str] = (),
    actor: User | None,
) -> None:
    """Store a credential. ``typed`` variables are replaced and ``cleared`` ones removed.

    A credential that cannot be decrypted is replaced completely. Pools that waited for an operator
    can launch again.
    """
    redaction.remember(value for name, value in typed.items() if is_secret(name))
    values = {name: v for name, v in known_values(credential).items() if name not in cleared}
    values |= typed
    now = timezone.now()
    credential.sealed = seal(values)
    credential.fields = sorted(values)
    credential.changed_at = now
    if credential._state.adding:
        credential.created_at, credential.created_by = now, actor
    credential.tested_at, credential.test_ok, credential.test_message = None, None, ""
    with transaction.atomic():
        credential.save()
        audit.record(
            "credential.saved",
            actor=actor,
            target=f"credential {credential}",
            detail=f"kind {credential.kind}; replaced {', '.join(sorted(typed)) or 'nothing'}; "
            f"removed {', '.join(sorted(cleared)) or 'nothing'}; pools can set "
            f"{json.dumps(credential.allowed_pool_options)}",
        )
        circuit_breaker.reset_for_credential(credential.kind, credential)


def known_values(credential: Credential) -> Mapping[str, str]:
    """The stored values; empty if they cannot be decrypted."""
    try:
        return open_credential(credential)
    except DecryptionError:
        return {}


def used_by(credential: Credential) -> list[str]:
    """Names of the runs that use it, newest first. Ended runs count: their buckets are still
    read."""
    pools = ReplicaPool.objects.filter(credential=credential).values("run_id")
    plans = EvaluationPlan.objects.filter(credential=credential).values("run_id")
    runs = Run.objects.filter(Q(store_credential=credential) | Q(pk__in=pools) | Q(pk__in=plans))
    return [run.name for run in runs]


def delete_credential(credential: Credential, *, actor: User | None = None) -> None:
    """Delete a credential. Raises :class:`InUse`."""
    try:
        with transaction.atomic():
            credential.delete()
            audit.record("credential.deleted", actor=actor, target=f"credential {credential}")
    except ProtectedError:
        names = used_by(credential)
        shown = ", ".join(names[:NAMES_SHOWN])
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        raise InUse(
            f"{credential} cannot be deleted: it is used by {shown}{more}. If it has leaked, "
            "revoke it at its provider and enter a new one here"
        ) from None


def test_credential(credential: Credential, uri: str = "") -> Tested:
    """Check the identity at the backend, or the needed operations in the bucket; store the result.

    A success counts as intervention: pools that waited for an operator can launch again. ``uri`` is
    for buckets; by default the prefix that the credential names.
    """
    tested = _try_test(credential, uri)
    tested = Tested(ok=tested.ok, message=clean_text(tested.message))
    changes: dict[str, Any] = {
        "tested_at": timezone.now(),
        "test_ok": tested.ok,
        "test_message": tested.message,
    }
    # Not if the credential was changed during the test.
    Credential.objects.filter(pk=credential.pk, sealed=credential.sealed).update(**changes)
    for name, value in changes.items():
        setattr(credential, name, value)
    if tested.ok:
        circuit_breaker.reset_for_credential(credential.kind, credential)
    return tested


test_credential.__test__ = False  # type: ignore[attr-defined]  # not a pytest test


def _try_test(credential: Credential, uri: str) -> Tested:
    """The result within :data:`PATIENCE_S`, whatever the endpoint does."""

    def test() -> Tested:
        if credential.kind == STORE:
            return _test_store(credential, uri or str(credential.options.get(TEST_URI) or ""))
        return Tested(ok=True, message=executor_of(credential.kind, credential).check())

    loading = wait_loaded({credential.kind} & BACKENDS.keys())
    if loading:
        return Tested(ok=False, message="The client library is still loading. Test again later.")
    try:
        return call(test, place=f"credential {credential.pk}", patience_s=PATIENCE_S)
    except (ExecutorError, StoreError, ValueError, ImportError, CallTimeout) as error:
        return Tested(ok=False, message=str(error) or type(error).__name__)
    except Exception as error:  # a bug or a broken client, whose message can contain anything
        return Tested(ok=False, message=f"could not be tested: {type(error).__name__}")


def _test_store(credential: Credential, uri: str) -> Tested:
    if not uri:
        return Tested(ok=False, message="expected a prefix to test with, found none")
    if problem := check_store(credential, uri):
        return Tested(ok=False, message=problem)
    environment = store_environment(credential)
    if problem := missing_operation(uri, environment):
        return Tested(ok=False, message=problem)
    if family_of(uri) != "s3" or not credential.options.get(ROLE_ARN):
        return Tested(ok=True, message=f"{uri}: can be written, read, listed and created in")
    session = sts.assume_role(
        credential.options, environment, uri=uri, name="archipelago-test", lifetime_s=None
    )
    redaction.remember(session.secrets, passing=True)
    if problem := missing_operation(uri, session.environment):
        return Tested(ok=False, message=f"with the keys that replicas get: {problem}")
    if problem := _open_to_all(uri, session):
        return Tested(ok=False, message=problem)
    minutes = session.lifetime_s / 60
    return Tested(
        ok=True,
        message=f"{uri}: can be written, read, listed and created in, by the server and by "
        f"replicas, whose keys open no other prefix and expire after {minutes:.0f} minutes",
    )


def _open_to_all(uri: str, session: sts.Session) -> str:
    """Why the store ignores session policies, so that one run's keys open every run; '' if not."""
    above, _, name = uri.rstrip("/").rpartition("/")
    if above.endswith("/"):  # the test is for the whole bucket
        return ""
    try:
        open_store(above, environment=session.environment).get_range(f"{name}-not/there", 0, 1)
    except StoreDenied:
        return ""
    except StoreUnavailable:
        raise
    except StoreError:
        pass
    return (
        f"replica keys open more than {uri}: the store does not keep to session policies. "
        "Without a role for replicas they get the credential itself"
    )
