"""What one attempt of a replica is given to open its rendezvous.

A credential of the run's bucket travels as it is, or as keys of a role that open the run's prefix
only and expire (:mod:`runs.credentials.sts`). Without one, of the server's own environment just
what belongs to the kind of bucket travels: names are listed, so that neither the database's, the
broker's nor Django's can be among them, nor another bucket's. What is not in the environment does
not travel: profiles and their files, the role of the machine the server runs on, a
``huggingface-cli login``. Of Google's, the key file that ``GOOGLE_APPLICATION_CREDENTIALS`` names
is read, because a path means nothing elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from diloco.store.credentials import family_of
from executors.base import NeedsPerson
from runs import redaction
from runs.credentials import sts
from runs.credentials.kinds import REPLICAS_BY_ROLE, ROLE_ARN, is_secret
from runs.credentials.vault import open_credential
from runs.models import Credential, Replica, Run

_OWN = {
    "s3": (
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION",
        "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3",
    ),
    "gs": ("STORAGE_EMULATOR_HOST", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"),
    "az": (
        "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME",
        "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_CLIENT_ID",
        "AZURE_STORAGE_CLIENT_SECRET", "AZURE_STORAGE_TENANT_ID",
    ),
    "hf": ("HF_TOKEN", "HF_ENDPOINT"),
}  # fmt: skip
"""Kind of store -> what of the server's own environment travels."""
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
    """What one attempt is given to open its rendezvous; ``lifetime_s`` None does not expire."""

    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    lifetime_s: float | None = None


def replica_secrets(run: Run, replica: Replica, *, lifetime_s: float | None) -> Opened:
    """What the replica's attempt of ``lifetime_s`` needs to open the rendezvous of ``run``.

    Raises :class:`executors.base.NeedsPerson` and :class:`~executors.base.RetryLater`.
    """
    family = family_of(run.rendezvous)
    if not family:
        return Opened()
    credential = run.store_credential
    backend = replica.pool.backend
    if credential is None:
        if backend == "local":  # it inherits them
            return Opened()
        if backend == "sagemaker" and family == "s3" and not _elsewhere(os.environ):
            return Opened()  # the role of its jobs opens Amazon's buckets
        return Opened(environment=server_environment(family, os.environ))
    if credential.options.get(REPLICAS_BY_ROLE):
        return Opened()
    environment = store_environment(credential)
    if family == "s3" and credential.options.get(ROLE_ARN):
        session = sts.assume_role(
            credential.options,
            environment,
            uri=run.rendezvous,
            name=f"{run.pk.hex[:12]}-{replica.number}",
            lifetime_s=lifetime_s,
        )
        redaction.remember(session.secrets, passing=True)
        return Opened(environment=session.environment, lifetime_s=session.lifetime_s)
    return Opened(environment=environment or {})


def store_environment(credential: Credential | None) -> Mapping[str, str] | None:
    """What the server opens a bucket with; None for its own environment. So it is too with a
    credential that has only a role: the server's own identity may assume it."""
    return open_credential(credential) or None


def server_environment(family: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Of the server's own environment, what belongs to buckets of ``family``."""
    found = {
        name: value
        for name, value in environ.items()
        if name in _OWN[family] or name.startswith(_OWN_PREFIXES[family])
    }
    if family == "gs" and "FSSPEC_GS" not in found and environ.get(_GOOGLE_FILE):
        found |= _google_key(Path(environ[_GOOGLE_FILE]))
    redaction.remember(value for name, value in found.items() if is_secret(name))
    return found


def _google_key(path: Path) -> dict[str, str]:
    try:
        key = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise NeedsPerson(
            f"{_GOOGLE_FILE}: expected a JSON key to give to replicas, found {path}: "
            f"{getattr(error, 'strerror', None) or 'no JSON'}"
        ) from None
    if key.get("type") not in _GOOGLE_TYPES:
        raise NeedsPerson(
            f"{_GOOGLE_FILE}: expected a key of type {' or '.join(_GOOGLE_TYPES)} to give to "
            f"replicas, found {key.get('type')!r}, which works on this machine only"
        )
    return {"FSSPEC_GS": json.dumps({"token": key})}


def _elsewhere(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL"))
