"""A :class:`~diloco.store.base.Store` over S3 by obstore, which moves the bytes outside the
interpreter lock: several times as fast as s3fs (``bench/store_speed.py``).

Where the bucket is and who asks is read as s3fs reads it, by botocore and fsspec's configuration:
the ``AWS_*`` variables, profiles and roles, and ``FSSPEC_S3_*`` (:func:`s3_location`). With a
credential of its own nothing of that is asked (:mod:`diloco.store.credentials`).

obstore tries a request again for a few seconds only; patience is :class:`diloco.store.retry`'s. Its
threads do not survive a fork, and no new store revives them: :func:`usable` says whether this
process may use it at all. Left out: options of fsspec that have no meaning here; whoever sets one
is served by s3fs.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
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
    UPLOADS_IN_FLIGHT,
    Data,
    MakeParts,
    MissingKey,
    ObjectInfo,
    ObjectTooLarge,
    Pages,
    StoreDenied,
    StoreUnavailable,
    check_key,
    join_pages,
)
from diloco.store.multipart import StreamedParts, upload_behind

if TYPE_CHECKING:
    from obstore.store import S3Credential

PART_TIMEOUT_S = 300
"""Longest one request may take that carries up to 16 MiB: half a megabit a second is enough."""
RECORD_TIMEOUT_S = 60
"""Longest a write of up to ``RECORD_BYTES``, a listing or a deletion may take. A beat that a dead
connection swallowed must be noticed while its lease lasts."""
RECORD_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 10
RETRIES = 3
RETRY_TIMEOUT_S = 20
RANGES_IN_FLIGHT = 4
CREDENTIALS_TTL_S = 900
REPLACED_WHILE_READ = 5
"""How often one read may find that the object was replaced under it."""

_KNOWN_OPTIONS = frozenset({"key", "secret", "token", "endpoint_url", "profile", "anon"})
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_S3_ERROR = re.compile(r"<Code>(\w+)</Code>\s*<Message>([^<]*)<")
_TRY_AGAIN = frozenset(
    {"RequestTimeout", "SlowDown", "ConditionalRequestConflict", "RequestTimeTooSkewed"}
)
"""Codes of S3. RequestTimeTooSkewed: the clock of this machine is wrong, until it is set."""
_TRY_AGAIN_STATUS = frozenset({408, 409, 412, 425, 429})

_runtime_pid: int | None = None


def usable() -> bool:
    """False in a process forked from one that has used obstore: there every call would hang."""
    return _runtime_pid in (None, os.getpid())


@dataclass(frozen=True)
class S3Location:
    """Where a bucket is; ``endpoint_url`` None is Amazon's own."""

    bucket: str
    prefix: str
    region: str
    endpoint_url: str | None


def fsspec_options() -> dict[str, Any]:
    """What fsspec is configured to open S3 with; ``FSSPEC_S3_*`` is read when it is imported."""
    return dict(fsspec.config.conf.get("s3", {}))


def understands_options() -> bool:
    return set(fsspec_options()) <= _KNOWN_OPTIONS


def _bucket_and_prefix(uri: str) -> tuple[str, str]:
    parts = urlsplit(uri, allow_fragments=False)
    if not parts.netloc:
        raise StoreDenied(f"expected s3://bucket/prefix, found {uri}")
    return parts.netloc, parts.path.strip("/")


def s3_location(uri: str) -> tuple[S3Location, botocore.session.Session]:
    """The bucket of an ``s3://`` URI, and the session that has its credentials."""
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
    """Options of obstore for whom to be: botocore's chain, asked again before it runs out."""
    options = fsspec_options()
    if options.get("anon"):
        return {"skip_signature": True}
    if options.get("key") and options.get("secret"):
        fixed = {"access_key_id": options["key"], "secret_access_key": options["secret"]}
        return {**fixed, **({"token": options["token"]} if options.get("token") else {})}
    found = session.get_credentials()
    if found is None:
        return {"skip_signature": True}

    def provide() -> S3Credential:
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token or None,
            "expires_at": datetime.now(UTC) + timedelta(seconds=CREDENTIALS_TTL_S),
        }

    return {"credential_provider": provide}


def _given(uri: str, environment: Mapping[str, str]) -> tuple[S3Location, dict[str, Any]]:
    """The bucket, and options of obstore that leave nothing to this process's environment, which
    it reads too."""
    access = credentials.s3_access(environment)
    bucket, prefix = _bucket_and_prefix(uri)
    location = S3Location(
        bucket=bucket, prefix=prefix, region=access.region, endpoint_url=access.endpoint_url
    )
    who: S3Credential = {
        "access_key_id": access.key_id,
        "secret_access_key": access.secret,
        "token": access.token,
        "expires_at": None,
    }
    hosted = access.endpoint_url is None
    endpoint = f"https://{bucket}.{access.host}" if hosted else access.endpoint_url
    return location, {
        "credential_provider": lambda: who,
        "skip_signature": False,
        "endpoint": endpoint,
        "aws_endpoint_url_s3": endpoint,  # the process's own goes before a given `endpoint`
        "virtual_hosted_style_request": hosted,
    }


def _client(location: S3Location, who: Mapping[str, Any], *, timeout_s: float) -> S3Store:
    endpoint = location.endpoint_url
    where = {"endpoint": endpoint} if endpoint else {"virtual_hosted_style_request": True}
    return S3Store(
        location.bucket,
        prefix=location.prefix or None,
        region=location.region,
        # As Amazon's own clients do it: TLS vouches for the body, else the signature.
        unsigned_payload=endpoint is None or endpoint.startswith("https://"),
        client_options={
            "allow_http": endpoint is not None and endpoint.startswith("http://"),
            "timeout": timedelta(seconds=timeout_s),
            "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        },
        retry_config={
            "max_retries": RETRIES,
            "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S),
            "backoff": {"max_backoff": timedelta(seconds=2)},
        },
        **{**where, **who},
    )


class ObstoreStore:
    """Objects under an ``s3://`` URI."""

    atomic_create = True

    def __init__(self, uri: str, *, environment: Mapping[str, str] | None = None) -> None:
        global _runtime_pid
        self.uri = uri.rstrip("/")
        if environment is None:
            location, session = s3_location(self.uri)
            who = _credentials(session)
        else:
            location, who = _given(self.uri, environment)
        try:
            self._records = _client(location, who, timeout_s=RECORD_TIMEOUT_S)
            self._parts = _client(location, who, timeout_s=PART_TIMEOUT_S)
        except (BaseError, ValueError) as error:
            raise StoreDenied(f"{uri}: {_said(error)}") from error
        _runtime_pid = os.getpid()

    def put(self, key: str, data: Data) -> None:
        client = self._records if len(data) <= RECORD_BYTES else self._parts
        with _store_errors(check_key(key)):
            obstore.put(client, key, data, chunk_size=PART_BYTES, max_concurrency=UPLOADS_IN_FLIGHT)

    def put_stream(self, key: str, make_parts: MakeParts) -> None:
        check_key(key)
        StreamedParts(make_parts).pass_to(lambda parts: self._put_parts(key, parts))

    def _put_parts(self, key: str, parts: Iterable[Data]) -> None:
        rest = iter(parts)
        first = next(rest, b"")
        second = next(rest, None)
        if second is None:
            self.put(key, first)
            return

        def upload(taken: Iterator[Data]) -> None:  # not here: its iterator must not use obstore
            obstore.put(
                self._parts,
                key,
                taken,
                use_multipart=True,
                chunk_size=PART_BYTES,
                max_concurrency=UPLOADS_IN_FLIGHT,
            )

        with _store_errors(key):
            upload_behind(chain((first, second), rest), upload)

    def create(self, key: str, data: Data) -> bool:
        with _store_errors(check_key(key)):
            try:
                obstore.put(self._records, key, data, mode="create")
            except AlreadyExistsError as error:
                if _status(error) == 409:  # S3 met another write under way: nobody won yet
                    raise StoreUnavailable(f"{key}: {_said(error)}") from error
                return False
            return True

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """One request for an object of up to ``PART_BYTES``, ranges of that size at once for
        larger ones, all of one version."""
        check_key(key)
        for _ in range(REPLACED_WHILE_READ):
            with _store_errors(key), contextlib.suppress(PreconditionError):
                return self._get_version(key, limit)
        raise StoreUnavailable(f"{key}: replaced again and again while it was read")

    def _get_version(self, key: str, limit: int | None) -> bytes:
        end = PART_BYTES if limit is None else min(PART_BYTES, max(limit, 0) + 1)
        try:
            answer = obstore.get(self._parts, key, options={"range": (0, end)})
            first = answer.bytes()
        except BaseError as error:
            if _status(error) == 416:
                return b""
            raise
        size_bytes, version = answer.meta["size"], answer.meta["e_tag"]
        if limit is not None and size_bytes > limit:
            raise ObjectTooLarge(key, limit)
        if size_bytes <= PART_BYTES:
            return bytes(first)

        def read(start: int) -> Any:
            end = min(size_bytes, start + PART_BYTES)
            wanted = obstore.get(
                self._parts, key, options={"range": (start, end), "if_match": version}
            )
            return wanted.bytes()

        with ThreadPoolExecutor(RANGES_IN_FLIGHT) as pool:
            rest = pool.map(read, range(PART_BYTES, size_bytes, PART_BYTES))
            return b"".join(chain([first], rest))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with _store_errors(check_key(key)):
            try:
                return bytes(obstore.get_range(self._parts, key, start=start, length=length))
            except BaseError as error:
                if _status(error) == 416:
                    return b""  # S3 refuses a range that starts at or past the end
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
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def _said(error: BaseException) -> str:
    """obstore's message without its debug dump; of an answer of S3, what S3 said."""
    status, answer = _status(error), _S3_ERROR.search(str(error))
    if answer:
        return f"{status} {answer[1]}: {answer[2]}"
    return str(error).split("\n\nDebug source")[0].replace("\n", " ")


@contextlib.contextmanager
def _store_errors(key: str) -> Iterator[None]:
    try:
        yield
    except PreconditionError:
        raise
    except (BaseError, OSError, ValueError) as error:
        said = f"{key}: {_said(error)}"
        found = _S3_ERROR.search(str(error))
        code, status = found[1] if found else "", _status(error)
        denied = isinstance(
            error, PermissionDeniedError | PermissionError | UnauthenticatedError | ValueError
        )
        if code == "NoSuchBucket" or (denied and code not in _TRY_AGAIN):
            raise StoreDenied(said) from error
        if isinstance(error, FileNotFoundError):
            raise MissingKey(key) from error
        refused = status is not None and 300 <= status < 500
        if refused and code not in _TRY_AGAIN and status not in _TRY_AGAIN_STATUS:
            raise StoreDenied(said) from error
        raise StoreUnavailable(said) from error
