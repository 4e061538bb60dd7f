"""Environment variables that an attempt of a replica gets to open its rendezvous.

If the run has a credential for its bucket, the attempt gets that credential, or temporary keys of a
role that are limited to the run's prefix (:mod:`runs.credentials.sts`).

Otherwise it gets the variables of the server's environment that belong to the kind of bucket. The
names are an allow list, so that no variable of the database, the broker, Django or another bucket
is sent. Access outside the environment is not sent: profiles and their files, the role of the
server's machine, a ``huggingface-cli login``. The key file that ``GOOGLE_APPLICATION_CREDENTIALS``
names is read and sent, because its path is meaningless on another machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from diloco.store.credentials import family_of
from executors.base import AccountError
from executors.registry import DESCRIPTIONS
from runs import redaction
from runs.credentials import sts
from runs.credentials.kinds import REPLICAS_BY_ROLE, ROLE_ARN, is_secret
from runs.credentials.vault import open_credential
from runs.models import Credential, Replica, Run

_OWN = {
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
    ),
    "gs": ("STORAGE_EMULATOR_HOST", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"),
    "az": (
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_STORAGE_ACCOUNT_NAME",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_CLIENT_ID",
        "AZURE_STORAGE_CLIENT_SECRET",
        "AZURE_STORAGE_TENANT_ID",
    ),
    "hf": ("HF_TOKEN", "HF_ENDPOINT"),
}
"""Kind of store -> variables of the server's own environment that replicas get."""
_OWN_PREFIXES = {
    "s3": ("FSSPEC_S3",),
    "gs": ("FSSPEC_GS", "FSSPEC_GCS"),
    "az": ("FSSPEC_AZ", "FSSPEC_ABFS"),
    "hf": ("FSSPEC_HF",),
}
_GOOGLE_FILE = "GOOGLE_APPLICATION_CREDENTIALS"
_GOOGLE_TYPES = ("service_account", "authorized_user")


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Environment variables of one attempt. ``lifetime_s`` is None if they do not expire."""

    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    lifetime_s: float | None = None


def replica_secrets(run: Run, replica: Replica, *, lifetime_s: float | None) -> Opened:
    """:func:`job_secrets` of an attempt of a replica."""
    name = f"{run.pk.hex[:12]}-{replica.number}"
    return job_secrets(run, replica.pool.backend, name=name, lifetime_s=lifetime_s)


def job_secrets(run: Run, backend: str, *, name: str, lifetime_s: float | None) -> Opened:
    """Environment variables with which a job on ``backend`` opens the rendezvous of ``run``.

    ``name`` is that of the job's session of a role. ``lifetime_s`` is the longest duration of the
    attempt, None if unlimited.

    Raises :class:`executors.base.AccountError` and :class:`~executors.base.RetryLater`.
    """
    family = family_of(run.rendezvous)
    if not family:
        return Opened()
    credential = run.store_credential
    if credential is None:
        description = DESCRIPTIONS[backend]
        if description.on_server:  # its jobs inherit the server's environment
            return Opened()
        if family in description.role_stores and not _has_endpoint(os.environ):
            return Opened()  # its jobs open the provider's buckets by their role
        return Opened(environment=server_environment(family, os.environ))
    if credential.options.get(REPLICAS_BY_ROLE):
        return Opened()
    environment = store_environment(credential)
    if family == "s3" and credential.options.get(ROLE_ARN):
        session = sts.assume_role(
            credential.options,
            environment,
            uri=run.rendezvous,
            name=name,
            lifetime_s=lifetime_s,
        )
        redaction.remember(session.secrets, passing=True)
        return Opened(environment=session.environment, lifetime_s=session.lifetime_s)
    return Opened(environment=environment or {})


def store_environment(credential: Credential | None) -> Mapping[str, str] | None:
    """Variables with which the server opens a bucket; None for its own environment.

    A credential that has only a role uses the server's own environment, whose identity can assume
    the role.
    """
    return open_credential(credential) or None


def server_environment(family: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of the server's own environment for buckets of ``family``."""
    variables = {
        name: value
        for name, value in environ.items()
        if name in _OWN[family] or name.startswith(_OWN_PREFIXES[family])
    }
    if family == "gs" and "FSSPEC_GS" not in variables and environ.get(_GOOGLE_FILE):
        variables |= _google_key(Path(environ[_GOOGLE_FILE]))
    redaction.remember(value for name, value in variables.items() if is_secret(name))
    return variables


def _google_key(path: Path) -> dict[str, str]:
    try:
        key = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise AccountError(
            f"{_GOOGLE_FILE}: expected a JSON key to give to replicas, found {path}: "
            f"{getattr(error, 'strerror', None) or 'no JSON'}"
        ) from None
    if key.get("type") not in _GOOGLE_TYPES:
        raise AccountError(
            f"{_GOOGLE_FILE}: expected a key of type {' or '.join(_GOOGLE_TYPES)} to give to "
            f"replicas, found {key.get('type')!r}, which works on this machine only"
        )
    return {"FSSPEC_GS": json.dumps({"token": key})}


def _has_endpoint(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL"))
