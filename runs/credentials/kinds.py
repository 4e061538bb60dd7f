"""What a credential of each kind holds.

``variables`` are named as the environment variables that the backend's or the store's own client
reads; they are sealed and never shown again, those that are no secret included. ``options`` are
stored in the open and shown. What a backend takes besides is documented by its executor and typed
as JSON.

A credential's ``kind`` in the database is a backend's name, or ``store``, of which the option
``scheme`` says the kind of store.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from diloco.store.credentials import family_of
from runs.models import Credential

STORE = "store"
SCHEME = "scheme"
"""Option of a store's credential: ``s3``, ``gs``, ``az`` or ``hf``."""
TEST_URI = "test_uri"
ROLE_ARN = "assume_role_arn"
REPLICAS_BY_ROLE = "replicas_by_role"


@dataclass(frozen=True, kw_only=True)
class Variable:
    """``read`` makes what is stored of what is typed, and raises :class:`ValueError`."""

    name: str
    label: str
    help: str = ""
    secret: bool = True
    required: bool = False
    long: bool = False
    read: Callable[[str], str] | None = None


@dataclass(frozen=True, kw_only=True)
class Option:
    name: str
    label: str
    help: str = ""
    type: type[str] | type[int] | type[bool] = str


@dataclass(frozen=True, kw_only=True)
class Kind:
    """``one_of``: names of which at least one must be there, beside those that are required;
    ``unless``: an option that makes all of that unnecessary."""

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
        """Of the model."""
        return self.backend or STORE


def _google_key(text: str) -> str:
    """The JSON key of an account as gcsfs' own arguments, which travel in one variable."""
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    known = ("service_account", "authorized_user")
    found = given.get("type") if isinstance(given, dict) else None
    if found not in known:
        other = "another" if given else "none"
        raise ValueError(f"expected a JSON key of type {' or '.join(known)}, found {other}")
    return json.dumps({"token": given})


_AWS = (
    Variable(name="AWS_ACCESS_KEY_ID", label="Access key ID", required=True),
    Variable(name="AWS_SECRET_ACCESS_KEY", label="Secret access key", required=True),
    Variable(
        name="AWS_SESSION_TOKEN", label="Session token",
        help="Only with temporary keys; these expire, and nothing here renews them",
    ),
)  # fmt: skip
_REGION = Variable(name="AWS_REGION", label="Region", secret=False, help="Such as eu-west-1")
_ROLE_HELP = (
    "Each attempt of a replica is given keys of it that open only its run's prefix, and expire"
)
_BY_ROLE = Option(
    name=REPLICAS_BY_ROLE, label="Replicas have access by themselves", type=bool,
    help="By a role or service account of their backend: they are given no keys",
)  # fmt: skip
_TEST_URI = Option(
    name=TEST_URI, label="Prefix to test with",
    help="Written to and cleaned up again; in the form of the rendezvous of a run",
)  # fmt: skip

KINDS = {
    kind.key: kind
    for kind in (
        Kind(
            key="modal", label="Modal", backend="modal",
            variables=(
                Variable(name="MODAL_TOKEN_ID", label="Token ID", required=True),
                Variable(name="MODAL_TOKEN_SECRET", label="Token secret", required=True),
            ),
            options=(
                Option(name="app", label="App", help="Empty for the name of this deployment"),
                Option(name="environment", label="Environment", help="Empty for the workspace's"),
            ),
        ),
        Kind(
            key="huggingface", label="Hugging Face Jobs", backend="huggingface",
            variables=(
                Variable(
                    name="HF_TOKEN", label="Token", required=True,
                    help="With the permission to start and manage Jobs",
                ),
            ),
            options=(
                Option(
                    name="namespace", label="Namespace", help="Who pays; empty for the token's own"
                ),
            ),
        ),
        Kind(
            key="sagemaker", label="Amazon SageMaker", backend="sagemaker",
            variables=(*_AWS, _REGION),
            options=(
                Option(name="role_arn", label="Execution role", help="arn:aws:iam::…:role/…"),
                Option(name="image", label="Image", help="In ECR; a pool's own goes first"),
            ),
        ),
        Kind(
            key="kubernetes", label="Kubernetes", backend="kubernetes",
            variables=(
                Variable(
                    name="KUBECONFIG", label="kubeconfig", required=True, long=True,
                    help="Its content, with token and certificates inside",
                ),
            ),
            options=(
                Option(name="namespace", label="Namespace"),
                Option(name="context", label="Context"),
                Option(name="image", label="Image", help="A pool's own goes first"),
            ),
        ),
        Kind(
            key="store-s3", label="Bucket: S3", scheme="s3",
            variables=(
                *_AWS,
                _REGION,
                Variable(
                    name="AWS_ENDPOINT_URL", label="Endpoint", secret=False,
                    help="Of another server than Amazon's, with http:// or https://",
                ),
            ),
            options=(
                Option(name=ROLE_ARN, label="Role for replicas", help=_ROLE_HELP),
                Option(name="external_id", label="External ID of that role"),
                Option(
                    name="max_session_s", label="Longest session of that role, seconds", type=int,
                    help="As the role itself allows; 3600 if empty",
                ),
                Option(name="kms_key_arn", label="KMS key of the bucket", help="For that role"),
                Option(
                    name="sts_endpoint_url", label="STS endpoint",
                    help="Empty for Amazon's, or for the endpoint above if there is one",
                ),
                _BY_ROLE,
                _TEST_URI,
            ),
            unless=ROLE_ARN,
        ),
        Kind(
            key="store-gs", label="Bucket: Google Cloud Storage", scheme="gs",
            variables=(
                Variable(
                    name="FSSPEC_GS", label="Key of a service account (JSON)", required=True,
                    long=True, read=_google_key,
                ),
            ),
            options=(_BY_ROLE, _TEST_URI),
        ),
        Kind(
            key="store-az", label="Bucket: Azure Blob Storage", scheme="az",
            variables=(
                Variable(
                    name="AZURE_STORAGE_CONNECTION_STRING", label="Connection string",
                    help="Or an account with a key, a token or a principal",
                ),
                Variable(name="AZURE_STORAGE_ACCOUNT_NAME", label="Account", secret=False),
                Variable(name="AZURE_STORAGE_ACCOUNT_KEY", label="Account key"),
                Variable(name="AZURE_STORAGE_SAS_TOKEN", label="SAS token"),
                Variable(
                    name="AZURE_STORAGE_TENANT_ID", label="Tenant of a principal", secret=False
                ),
                Variable(name="AZURE_STORAGE_CLIENT_ID", label="Its client ID", secret=False),
                Variable(name="AZURE_STORAGE_CLIENT_SECRET", label="Its client secret"),
            ),
            options=(_BY_ROLE, _TEST_URI),
            one_of=("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME"),
        ),
        Kind(
            key="store-hf", label="Repository: Hugging Face", scheme="hf",
            variables=(
                Variable(
                    name="HF_TOKEN", label="Token", required=True, help="With write access"
                ),
            ),
            options=(_BY_ROLE, _TEST_URI),
        ),
    )
}  # fmt: skip

_PUBLIC = {
    variable.name
    for kind in KINDS.values()
    for variable in kind.variables
    if not variable.secret
} | {
    "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3", "HF_ENDPOINT", "MODAL_ENVIRONMENT",
    "MODAL_SERVER_URL", "STORAGE_EMULATOR_HOST",
}  # fmt: skip


def is_secret(variable: str) -> bool:
    """Whether the value of an environment variable is to be struck out; of one nobody knows too."""
    return variable not in _PUBLIC


def kind_of(credential: Credential) -> Kind | None:
    """None for one that was made by hand and is of no kind that forms know."""
    key = credential.kind
    if key == STORE:
        key = f"{STORE}-{credential.options.get(SCHEME, '')}"
    return KINDS.get(key)


def check_store(credential: Credential, uri: str) -> str:
    """What is wrong with opening ``uri`` by that credential, in words; empty when nothing is."""
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
