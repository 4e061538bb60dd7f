"""Kinds of credentials: their variables and options.

``variables`` have the names of the environment variables that the client of the backend or store
reads. They are stored encrypted and never shown again, even those that are not secret. ``options``
are stored and shown as plain text. The executor of a backend documents its further options, which
users enter as JSON.

The ``kind`` of a credential in the database is the name of a backend, or ``store``; then the option
``scheme`` selects the kind of store.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from diloco.protocol.parsing import parse_json
from diloco.store.credentials import family_of
from executors.backend import AWS_KEYS, Backend, Variable
from executors.registry import DESCRIPTIONS
from runs.models import Credential

STORE = "store"
SCHEME = "scheme"
"""Option of a store credential: ``s3``, ``gs``, ``az`` or ``hf``."""
TEST_URI = "test_uri"
ROLE_ARN = "assume_role_arn"
REPLICAS_BY_ROLE = "replicas_by_role"


@dataclass(frozen=True, kw_only=True)
class Option:
    """A setting of a credential that is not secret."""

    name: str
    label: str
    help: str = ""
    type: Any = str


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of credential, as forms show it.

    Attributes:
        one_of: names of variables of which at least one is needed besides the required ones.
        unless: an option that makes all variables optional.
    """

    key: str
    label: str
    backend: str = ""
    scheme: str = ""
    variables: tuple[Variable, ...]
    options: tuple[Option, ...] = ()
    one_of: tuple[str, ...] = ()
    unless: str = ""

    @property
    def kind(self) -> str:
        """Value of ``Credential.kind``."""
        return self.backend or STORE


def _google_key(text: str) -> str:
    """Convert the JSON key of an account to arguments of gcsfs, which fit in one variable."""
    try:
        key = parse_json(text)
    except ValueError:
        key = None
    known = ("service_account", "authorized_user")
    found = key.get("type") if isinstance(key, dict) else None
    if found not in known:
        other = "another" if key else "none"
        raise ValueError(f"expected a JSON key of type {' or '.join(known)}, found {other}")
    return json.dumps({"token": key})


_ROLE_HELP = "Each attempt gets temporary keys of this role, limited to the prefix of its run"
_BY_ROLE = Option(
    name=REPLICAS_BY_ROLE,
    label="Replicas have their own access",
    type=bool,
    help="Through a role or service account of their backend; they get no keys",
)
_TEST_URI = Option(
    name=TEST_URI,
    label="Prefix to test with",
    help="A rendezvous URI; the test writes there and cleans up",
)


def _kind_of_backend(backend: Backend) -> Kind:
    return Kind(
        key=backend.name,
        label=backend.label,
        backend=backend.name,
        variables=backend.variables,
        options=tuple(
            Option(name=option.name, label=option.label, help=option.help, type=option.kind)
            for option in backend.declared_options.values()
            if option.in_credential
        ),
    )


KINDS = {
    kind.key: kind
    for kind in (
        *(_kind_of_backend(each) for each in DESCRIPTIONS.values() if each.variables),
        Kind(
            key="store-s3",
            label="Bucket: S3",
            scheme="s3",
            variables=(
                *AWS_KEYS,
                Variable(
                    name="AWS_ENDPOINT_URL",
                    label="Endpoint",
                    secret=False,
                    help="Of a server other than Amazon S3, with http:// or https://",
                ),
            ),
            options=(
                Option(name=ROLE_ARN, label="Role for replicas", help=_ROLE_HELP),
                Option(name="external_id", label="External ID of that role"),
                Option(
                    name="max_session_s",
                    label="Longest session of that role, seconds",
                    type=int,
                    help="The role's maximum session duration; leave empty for 3600",
                ),
                Option(name="kms_key_arn", label="KMS key of the bucket", help="For that role"),
                Option(
                    name="sts_endpoint_url",
                    label="STS endpoint",
                    help="Leave empty for the endpoint above, if any, or Amazon's",
                ),
                _BY_ROLE,
                _TEST_URI,
            ),
            unless=ROLE_ARN,
        ),
        Kind(
            key="store-gs",
            label="Bucket: Google Cloud Storage",
            scheme="gs",
            variables=(
                Variable(
                    name="FSSPEC_GS",
                    label="Key of a service account (JSON)",
                    required=True,
                    long=True,
                    read=_google_key,
                ),
            ),
            options=(_BY_ROLE, _TEST_URI),
        ),
        Kind(
            key="store-az",
            label="Bucket: Azure Blob Storage",
            scheme="az",
            variables=(
                Variable(
                    name="AZURE_STORAGE_CONNECTION_STRING",
                    label="Connection string",
                    help="Or an account with a key, a token or a service principal",
                ),
                Variable(name="AZURE_STORAGE_ACCOUNT_NAME", label="Account", secret=False),
                Variable(name="AZURE_STORAGE_ACCOUNT_KEY", label="Account key"),
                Variable(name="AZURE_STORAGE_SAS_TOKEN", label="SAS token"),
                Variable(
                    name="AZURE_STORAGE_TENANT_ID",
                    label="Tenant of a service principal",
                    secret=False,
                ),
                Variable(name="AZURE_STORAGE_CLIENT_ID", label="Its client ID", secret=False),
                Variable(name="AZURE_STORAGE_CLIENT_SECRET", label="Its client secret"),
            ),
            options=(_BY_ROLE, _TEST_URI),
            one_of=("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME"),
        ),
        Kind(
            key="store-hf",
            label="Repository: Hugging Face",
            scheme="hf",
            variables=(
                Variable(name="HF_TOKEN", label="Token", required=True, help="Needs write access"),
            ),
            options=(_BY_ROLE, _TEST_URI),
        ),
    )
}

_PUBLIC = {
    variable.name for kind in KINDS.values() for variable in kind.variables if not variable.secret
}.union(
    *(backend.public_variables for backend in DESCRIPTIONS.values()),
    {"AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3", "HF_ENDPOINT", "STORAGE_EMULATOR_HOST"},
)


def is_secret(variable: str) -> bool:
    """Whether to redact the value of an environment variable. Unknown variables are secret."""
    return variable not in _PUBLIC


def kind_of(credential: Credential) -> Kind | None:
    """The kind of a credential; None if no form has it (the row was created by hand)."""
    key = credential.kind
    if key == STORE:
        key = f"{STORE}-{credential.options.get(SCHEME, '')}"
    return KINDS.get(key)


def check_store(credential: Credential, uri: str) -> str:
    """Why the credential cannot open ``uri``; '' if it can."""
    scheme = credential.options.get(SCHEME, "")
    if credential.kind != STORE:
        return (
            f"expected a credential for a bucket, found {credential.name!r} for {credential.kind}"
        )
    if family_of(uri) != scheme:
        return (
            f"expected the rendezvous of credential {credential.name!r} to be in {scheme}://, "
            f"found {uri}"
        )
    return ""
