"""A :class:`~diloco.store.base.Store` on S3 with obstore, whose transfers run outside the
interpreter lock: several times as fast as s3fs (``bench/store_speed.py``).

Endpoint, region and credentials are read as s3fs reads them, by botocore and fsspec's
configuration: the ``AWS_*`` variables, profiles and roles, and ``FSSPEC_S3_*``
(:func:`s3_location`). A store that is opened with a credential reads none of these
(:mod:`diloco.store.credentials`).

obstore retries for a few seconds only; :mod:`diloco.store.retry` retries longer. Parts of a
multipart upload are the exception: only obstore can continue an upload. obstore's threads
do not survive a fork, and a new store does not restart them: :func:`usable` reports whether this
process can use obstore. Other options of fsspec have no equivalent here; a configuration with one
uses s3fs.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import botocore.session
import fsspec.config
import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from diloco.store import credentials
from diloco.store.base import (
    LISTED,
    PAGE_OBJECTS,
    PART_BYTES,
    MissingKey,
    ObjectInfo,
    ObjectTooLarge,
    Pages,
    StoreDenied,
    StoreUnavailable,
    check_key,
    join_pages,
)
from diloco.store.daemon import DaemonPool
from diloco.store.multipart import Data, MakeParts, StreamedParts, upload_behind
from diloco.store.transfers import DOWNLOAD_LINE, UPLOAD_LINE

if TYPE_CHECKING:
    from obstore.store import S3Credential

PART_TIMEOUT_S = 300
"""Timeout of a request that carries up to 16 MiB: enough for half a megabit per second."""
RECORD_TIMEOUT_S = 60
"""Timeout of a write of up to ``RECORD_BYTES``, a listing or a deletion. A heartbeat lost on a dead
connection must be noticed before its lease expires."""
RECORD_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 10
RETRIES = 3
RETRY_TIMEOUT_S = 20
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 2.0
UPLOAD_RETRIES = 100
UPLOAD_RETRY_TIMEOUT_S = 60
"""For how long a part of a multipart upload is retried, with growing pauses. The parts that are
stored remain; a retry of the whole upload would begin with the first one. Then the upload is
aborted."""
CREDENTIALS_TTL_S = 900
REPLACED_WHILE_READ = 5
"""Attempts to read an object that is replaced between two of its ranges."""

_KNOWN_OPTIONS = frozenset({"key", "secret", "token", "endpoint_url", "profile", "anon"})
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_S3_ERROR = re.compile(r"<Code>(\w+)</Code>\s*<Message>([^<]*)<")
_TRY_AGAIN = frozenset(
    {"RequestTimeout", "SlowDown", "ConditionalRequestConflict", "RequestTimeTooSkewed"}
)
"""Retryable error codes of S3. RequestTimeTooSkewed: this machine's clock is wrong, until NTP
corrects it."""
_TRY_AGAIN_STATUS = frozenset({408, 409, 412, 425, 429})

_runtime_pid: int | None = None


def usable() -> bool:
    """Return False in a process forked from one that has used obstore, where every call would
    hang."""
    return _runtime_pid in (None, os.getpid())


@dataclass(frozen=True)
class S3Location:
    """Bucket, prefix and endpoint; ``endpoint_url`` None is Amazon's endpoint."""

    bucket: str
    prefix: str
    region: str
    endpoint_url: str | None


def fsspec_options() -> dict[str, Any]:
    """Return fsspec's configuration of S3; fsspec reads ``FSSPEC_S3_*`` when it is imported."""
    return dict(fsspec.config.conf.get("s3", {}))


def understands_options() -> bool:
    """Return whether obstore has an equivalent of every option configured for s3fs."""
    return set(fsspec_options()) <= _KNOWN_OPTIONS


def _bucket_and_prefix(uri: str) -> tuple[str, str]:
    parts = urlsplit(uri, allow_fragments=False)
    if not parts.netloc:
        raise StoreDenied(f"expected s3://bucket/prefix, found {uri}")
    return parts.netloc, parts.path.strip("/")


def s3_location(uri: str) -> tuple[S3Location, botocore.session.Session]:
    """Return the location of an ``s3://`` URI and the botocore session that has its credentials."""
    bucket, prefix = _bucket_and_prefix(uri)
    options = fsspec_options()
    session = botocore.session.Session(profile=options.get("profile"))
    region = session.get_config_variable("region") or os.environ.get("AWS_REGION") or "us-east-1"
    client = session.create_client(
        "s3", region_name=region, endpoint_url=options.get("endpoint_url")
    )
    endpoint_url = str(client.meta.endpoint_url)
    host = urlsplit(endpoint_url).hostname or ""
    amazon = host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
    location = S3Location(
        bucket=bucket,
        prefix=prefix,
        region=region,
        endpoint_url=None if amazon else endpoint_url,
    )
    return location, session


def _credentials(session: botocore.session.Session) -> dict[str, Any]:
    """Return obstore's options for botocore's credential chain, which is queried again before the
    credentials expire."""
    options = fsspec_options()
    if options.get("anon"):
        return {"skip_signature": True}
    if options.get("key") and options.get("secret"):
        fixed = {"access_key_id": options["key"], "secret_access_key": options["secret"]}
        return {**fixed, **({"token": options["token"]} if options.get("token") else {})}
    chain_credentials = session.get_credentials()
    if chain_credentials is None:
        return {"skip_signature": True}

    def provide() -> S3Credential:
        frozen = chain_credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token or None,
            "expires_at": datetime.now(UTC) + timedelta(seconds=CREDENTIALS_TTL_S),
        }

    return {"credential_provider": provide}


def _from_credential(uri: str, environment: Mapping[str, str]) -> tuple[S3Location, dict[str, Any]]:
    """Return the location and obstore's options of a credential. They override every option that
    obstore would read from this process's environment."""
    access = credentials.s3_access(environment)
    bucket, prefix = _bucket_and_prefix(uri)
    location = S3Location(
        bucket=bucket, prefix=prefix, region=access.region, endpoint_url=access.endpoint_url
    )
    credential: S3Credential = {
        "access_key_id": access.key_id,
        "secret_access_key": access.secret,
        "token": access.token,
        "expires_at": None,
    }
    hosted = access.endpoint_url is None
    endpoint = f"https://{bucket}.{access.host}" if hosted else access.endpoint_url
    return location, {
        "credential_provider": lambda: credential,
        "skip_signature": False,
        "endpoint": endpoint,
        "aws_endpoint_url_s3": endpoint,  # in the environment it overrides `endpoint`
        "virtual_hosted_style_request": hosted,
    }


def _client(
    location: S3Location,
    credential: Mapping[str, Any],
    *,
    timeout_s: float,
    retries: int = RETRIES,
    retry_timeout_s: float = RETRY_TIMEOUT_S,
) -> S3Store:
    endpoint = location.endpoint_url
    where = {"endpoint": endpoint} if endpoint else {"virtual_hosted_style_request": True}
    return S3Store(
        location.bucket,
        prefix=location.prefix or None,
        region=location.region,
        # As in Amazon's SDKs: TLS protects the body's integrity, otherwise the signature.
        unsigned_payload=endpoint is None or endpoint.startswith("https://"),
        client_options={
            "allow_http": endpoint is not None and endpoint.startswith("http://"),
            "timeout": timedelta(seconds=timeout_s),
            "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        },
        retry_config={
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=retry_timeout_s),
            "backoff": {
                "init_backoff": timedelta(seconds=FIRST_BACKOFF_S),
                "max_backoff": timedelta(seconds=LONGEST_BACKOFF_S),
            },
        },
        **{**where, **credential},
    )


class ObstoreStore:
    """Objects under an ``s3://`` URI."""

    atomic_create = True

    def __init__(self, uri: str, *, environment: Mapping[str, str] | None = None) -> None:
        global _runtime_pid
        self.uri = uri.rstrip("/")
        if environment is None:
            location, session = s3_location(self.uri)
            credential = _credentials(session)
        else:
            location, credential = _from_credential(self.uri, environment)
        try:
            self._records = _client(location, credential, timeout_s=RECORD_TIMEOUT_S)
            self._parts = _client(location, credential, timeout_s=PART_TIMEOUT_S)
            self._uploads = _client(
                location,
                credential,
                timeout_s=PART_TIMEOUT_S,
                retries=UPLOAD_RETRIES,
                retry_timeout_s=UPLOAD_RETRY_TIMEOUT_S,
            )
        except (BaseError, ValueError) as error:
            raise StoreDenied(f"{uri}: {_message(error)}") from error
        _runtime_pid = os.getpid()

    def put(self, key: str, data: Data) -> None:
        client = self._records if len(data) <= RECORD_BYTES else self._parts
        with _store_errors(check_key(key)):
            obstore.put(client, key, data, chunk_size=PART_BYTES, max_concurrency=UPLOAD_LINE.limit)

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        check_key(key)
        StreamedParts(make_parts).upload_with(lambda parts: self._put_parts(key, parts, size_bytes))

    def _put_parts(self, key: str, parts: Iterable[Data], size_bytes: int | None) -> None:
        rest = iter(parts)
        first = next(rest, b"")
        second = next(rest, None)
        if second is None:
            self.put(key, first)
            return

        def upload(taken: Iterator[Data]) -> None:  # obstore calls within its own iterator hang
            obstore.put(
                self._uploads,
                key,
                stream.counted(taken),
                use_multipart=True,
                chunk_size=PART_BYTES,
                max_concurrency=stream.limit,
            )

        count = None if size_bytes is None else -(-size_bytes // PART_BYTES)
        with UPLOAD_LINE.measured(count) as stream, _store_errors(key):
            upload_behind(chain((first, second), rest), upload)

    def create(self, key: str, data: Data) -> bool:
        with _store_errors(check_key(key)):
            try:
                obstore.put(self._records, key, data, mode="create")
            except AlreadyExistsError as error:
                if _status(error) == 409:  # S3: a concurrent write, no writer has won yet
                    raise StoreUnavailable(f"{key}: {_message(error)}") from error
                return False
            return True

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """Read an object of up to ``PART_BYTES`` with one request, a larger one with parallel
        ranges of that size; all of one version."""
        check_key(key)
        for _ in range(REPLACED_WHILE_READ):
            with _store_errors(key), contextlib.suppress(PreconditionError):
                return self._get_version(key, limit)
        raise StoreUnavailable(f"{key}: replaced {REPLACED_WHILE_READ} times while it was read")

    def _get_version(self, key: str, limit: int | None) -> bytes:
        end = PART_BYTES if limit is None else min(PART_BYTES, max(limit, 0) + 1)
        try:
            response = obstore.get(self._parts, key, options={"range": (0, end)})
            first = response.bytes()
        except BaseError as error:
            if _status(error) == 416:
                return b""
            raise
        size_bytes, version = response.meta["size"], response.meta["e_tag"]
        if limit is not None and size_bytes > limit:
            raise ObjectTooLarge(key, limit)
        if size_bytes <= PART_BYTES:
            return bytes(first)

        def read(start: int) -> Any:
            end = min(size_bytes, start + PART_BYTES)
            response = obstore.get(
                self._parts, key, options={"range": (start, end), "if_match": version}
            )
            return response.bytes()

        with DaemonPool(DOWNLOAD_LINE.limit, "get") as pool:
            starts = range(PART_BYTES, size_bytes, PART_BYTES)
            rest = [pool.submit(read, start) for start in starts]
            return b"".join([first, *(part.result() for part in rest)])

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with _store_errors(check_key(key)):
            try:
                return bytes(obstore.get_range(self._parts, key, start=start, length=length))
            except BaseError as error:
                if _status(error) == 416:
                    return b""  # S3 rejects a range that starts at or past the end
                raise

    def list(self, prefix: str, *, limit: int = LISTED) -> builtins.list[ObjectInfo]:
        return join_pages(self.list_pages(prefix), prefix, limit)

    def list_pages(self, prefix: str) -> Pages:
        folder = check_key(prefix.rstrip("/")) if prefix else None
        with _store_errors(prefix):
            for page in obstore.list(self._records, prefix=folder, chunk_size=PAGE_OBJECTS):
                yield [ObjectInfo(info["path"], info["size"]) for info in page]

    def delete(self, keys: Iterable[str]) -> None:
        names = [check_key(key) for key in keys]
        with _store_errors(", ".join(names[:3])):
            if names:
                obstore.delete(self._records, names)


def _status(error: BaseException) -> int | None:
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def _message(error: BaseException) -> str:
    """Return obstore's message without its debug output; for an error of S3, its code and
    message."""
    status, response = _status(error), _S3_ERROR.search(str(error))
    if response:
        return f"{status} {response[1]}: {response[2]}"
    return str(error).split("\n\nDebug source")[0].replace("\n", " ")


@contextlib.contextmanager
def _store_errors(key: str) -> Iterator[None]:
    try:
        yield
    except PreconditionError:
        raise
    except (BaseError, OSError, ValueError) as error:
        message = f"{key}: {_message(error)}"
        match = _S3_ERROR.search(str(error))
        code, status = match[1] if match else "", _status(error)
        denied = isinstance(
            error, PermissionDeniedError | PermissionError | UnauthenticatedError | ValueError
        )
        if code == "NoSuchBucket" or (denied and code not in _TRY_AGAIN):
            raise StoreDenied(message) from error
        if isinstance(error, FileNotFoundError):
            raise MissingKey(key) from error
        refused = status is not None and 300 <= status < 500
        if refused and code not in _TRY_AGAIN and status not in _TRY_AGAIN_STATUS:
            raise StoreDenied(message) from error
        raise StoreUnavailable(message) from error
