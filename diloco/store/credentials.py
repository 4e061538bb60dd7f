"""Client options of a credential that is separate from the process's environment.

Several runs of one server can each have a credential, so no option of the process may leak into a
client that was opened with one: every option that the client would otherwise look up in
``os.environ``, in a profile or in fsspec's configuration is passed explicitly. A credential is a
mapping of the environment variables that a process would have:

- ``s3``: ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``, ``AWS_SESSION_TOKEN``, ``AWS_REGION`` or
  ``AWS_DEFAULT_REGION``, and for a server other than Amazon's ``AWS_ENDPOINT_URL_S3`` or
  ``AWS_ENDPOINT_URL``;
- ``gs``: ``FSSPEC_GS``, a JSON object of gcsfs arguments whose ``token`` is the content of a
  service account's key file; ``STORAGE_EMULATOR_HOST``;
- ``az``: ``AZURE_STORAGE_CONNECTION_STRING``, or ``AZURE_STORAGE_ACCOUNT_NAME`` with one of
  ``AZURE_STORAGE_ACCOUNT_KEY``, ``AZURE_STORAGE_SAS_TOKEN``, or ``AZURE_STORAGE_CLIENT_ID``,
  ``AZURE_STORAGE_CLIENT_SECRET`` and ``AZURE_STORAGE_TENANT_ID``;
- ``hf``: ``HF_TOKEN``, ``HF_ENDPOINT``.

Errors are :class:`~diloco.store.base.StoreDenied` and name variables, never values. Arguments of
the clients: https://s3fs.readthedocs.io/en/latest/api.html,
https://gcsfs.readthedocs.io/en/latest/api.html, https://github.com/fsspec/adlfs,
https://huggingface.co/docs/huggingface_hub/guides/hf_file_system.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from diloco.store.base import StoreDenied

Environment = Mapping[str, str]

FAMILIES = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "az"),
    "hf": "hf",
}
"""Scheme of a URI -> the kind of credential that its store takes."""

_GOOGLE = "https://storage.googleapis.com"
_HUB = "https://huggingface.co"


@dataclass(frozen=True, kw_only=True)
class S3Access:
    """An S3 access key and the server that it is for; ``endpoint_url`` None is Amazon's endpoint of
    the region."""

    key_id: str = field(repr=False)
    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    region: str = "us-east-1"
    endpoint_url: str | None = None

    @property
    def host(self) -> str:
        """Host name of the region's endpoint. Amazon's regions in China have another domain."""
        return f"s3.{self.region}.amazonaws.com{'.cn' if self.region.startswith('cn-') else ''}"


def family_of(uri: str) -> str:
    """Return ``s3``, ``gs``, ``az`` or ``hf``; an empty string for a URI that takes no
    credential."""
    return FAMILIES.get(urlsplit(uri).scheme, "")


def s3_access(environment: Environment) -> S3Access:
    """Read an S3 credential. Raises :class:`StoreDenied` if the access key is missing."""
    _expect(environment, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    given = environment.get
    return S3Access(
        key_id=environment["AWS_ACCESS_KEY_ID"],
        secret=environment["AWS_SECRET_ACCESS_KEY"],
        token=given("AWS_SESSION_TOKEN") or None,
        region=given("AWS_REGION") or given("AWS_DEFAULT_REGION") or "us-east-1",
        endpoint_url=given("AWS_ENDPOINT_URL_S3") or given("AWS_ENDPOINT_URL") or None,
    )


def fsspec_options(uri: str, environment: Environment) -> dict[str, Any]:
    """Return the arguments of the file system of ``uri``, with every option that it would look up
    elsewhere."""
    family = family_of(uri)
    if family == "s3":
        return _s3(s3_access(environment))
    if family == "gs":
        return _gs(environment)
    if family == "az":
        return _az(environment)
    if family == "hf":
        endpoint = environment.get("HF_ENDPOINT") or _HUB
        return {"token": environment.get("HF_TOKEN") or False, "endpoint": endpoint}
    raise StoreDenied(
        f"{uri}: expected a URI of {', '.join(FAMILIES)} to open with a credential, found another"
    )


def check_connection_string(fs: Any, options: Mapping[str, Any]) -> None:
    """Check that adlfs uses the given connection string: it prefers one of the process's
    environment."""
    found = getattr(fs, "connection_string", None)
    if "connection_string" in options and found != options["connection_string"]:
        raise StoreDenied(
            "expected this process to have no AZURE_STORAGE_CONNECTION_STRING in its environment, "
            "because the client would use it instead of the credential, found one"
        )


def _s3(access: S3Access) -> dict[str, Any]:
    return {
        "key": access.key_id,
        "secret": access.secret,
        "token": access.token,
        "endpoint_url": access.endpoint_url or f"https://{access.host}",
        "client_kwargs": {"region_name": access.region},
        "profile": None,
        "anon": False,
    }


def _gs(environment: Environment) -> dict[str, Any]:
    text = environment.get("FSSPEC_GS") or "{}"
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise StoreDenied("FSSPEC_GS: expected a JSON object of gcsfs' arguments, found another")
    host = environment.get("STORAGE_EMULATOR_HOST") or _GOOGLE
    where = {"endpoint_url": host if "://" in host else f"http://{host}"}
    return {"token": "anon", **where, **given}


def _az(environment: Environment) -> dict[str, Any]:
    """Return a connection string where possible: adlfs uses it before any other option."""
    connection = environment.get("AZURE_STORAGE_CONNECTION_STRING")
    explicit = {"connection_string": None, "anon": False}
    if connection:
        return {**explicit, "connection_string": connection}
    _expect(environment, "AZURE_STORAGE_ACCOUNT_NAME")
    account = environment["AZURE_STORAGE_ACCOUNT_NAME"]
    key, sas_token = (
        environment.get(f"AZURE_STORAGE_{name}") for name in ("ACCOUNT_KEY", "SAS_TOKEN")
    )
    endpoint = f"BlobEndpoint=https://{account}.blob.core.windows.net"
    if key:
        connection_string = f"{endpoint};AccountName={account};AccountKey={key}"
        return {**explicit, "connection_string": connection_string}
    if sas_token:
        connection_string = f"{endpoint};SharedAccessSignature={sas_token.removeprefix('?')}"
        return {**explicit, "connection_string": connection_string}
    names = [f"AZURE_STORAGE_{name}" for name in ("CLIENT_ID", "CLIENT_SECRET", "TENANT_ID")]
    _expect(environment, *names)
    from azure.identity.aio import ClientSecretCredential

    credential = ClientSecretCredential(
        client_id=environment[names[0]],
        client_secret=environment[names[1]],
        tenant_id=environment[names[2]],
    )
    return {**explicit, "account_name": account, "credential": credential}


def _expect(environment: Environment, *names: str) -> None:
    missing = [name for name in names if not environment.get(name)]
    if missing:
        found = ", ".join(sorted(environment)) or "nothing"
        raise StoreDenied(f"credential: expected {', '.join(missing)}, found {found}")
