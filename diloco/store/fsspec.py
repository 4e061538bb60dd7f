"""A :class:`~diloco.store.base.Store` on any fsspec file system.

Listings are never cached, because a peer's new object must be visible at once. Instances are not
shared (``skip_instance_cache``), because an s3fs instance must not cross a fork.

Conditional writes and errors differ between file systems: s3fs reports a lost ``If-None-Match``
race as ``OSError(EINVAL)`` whose cause has the code ``PreconditionFailed``. On a file system
without a conditional write, :meth:`FsspecStore.create` raises instead of checking and then writing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from fsspec.core import url_to_fs

from diloco.errors import install_extra
from diloco.store import credentials, fsspec_pages
from diloco.store.base import (
    LISTED,
    PART_BYTES,
    CannotOpen,
    MissingKey,
    ObjectInfo,
    Pages,
    StoreDenied,
    StoreUnavailable,
    check_key,
    check_size,
    join_pages,
)
from diloco.store.multipart import Data, MakeParts, StreamedParts, upload_behind

AZURE_RETRIES = 2
AZURE_BACKOFF_S = 0.5

_ATOMIC_CREATE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"})
_STREAMS = _ATOMIC_CREATE - {"memory"}
"""File systems where an open file is invisible until it is closed, and can be discarded."""
EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure", "hf": "hf"}
"""The extra of the library with the client of a scheme."""
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound"})
_DENIED_CODES = frozenset(
    {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "PermanentRedirect"}
    | {"400", "401", "403", "405", "411", "413", "501"}
)
_MISSING_CODES = frozenset({"NoSuchKey", "BlobNotFound", "404"})
_PAST_THE_END = frozenset({"InvalidRange", "416"})
_EXISTS = frozenset({"PreconditionFailed", "BlobAlreadyExists", "412"})


class FsspecStore:
    """Objects under ``uri`` on the fsspec file system of its scheme.

    ``coordinator``: this process is the coordinator, the only one that creates objects, so
    ``create`` can check and then write on a file system without a conditional write.
    ``environment``: see :mod:`diloco.store.credentials`.
    """

    def __init__(
        self,
        uri: str,
        *,
        coordinator: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._sole_creator = coordinator
        self.uri = uri.rstrip("/")
        credential = {} if environment is None else credentials.fsspec_options(uri, environment)
        try:
            options = {"skip_instance_cache": True, "use_listings_cache": False, **credential}
            self._fs, path = url_to_fs(self.uri, **options)
        except ImportError as error:
            extra = EXTRAS.get(urlsplit(uri).scheme)
            remedy = f"; {install_extra(extra)}" if extra else ""
            raise CannotOpen(f"{uri}: {error}{remedy}") from error
        except ValueError as error:
            raise CannotOpen(
                f"{uri}: {error}. Enter a URI such as s3://bucket/run or a folder such as /mnt/run"
            ) from error
        credentials.check_connection_string(self._fs, credential)
        _limit_azure_retries(self._fs)
        self._root = str(path).rstrip("/")
        protocol = self._fs.protocol
        self._protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self._is_hub = "hf" in self._protocols
        self._refresh = {"refresh": True} if self._is_hub else {}
        self.atomic_create = bool(self._protocols & _ATOMIC_CREATE)

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def put(self, key: str, data: Data) -> None:
        path = self._path(key)
        with _store_errors(key, writing=True):
            self._fs.pipe_file(path, bytes(data))

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        StreamedParts(make_parts).upload_with(lambda parts: self._put_parts(key, parts))

    def _put_parts(self, key: str, parts: Iterable[Data]) -> None:
        path = self._path(key)
        with _store_errors(key, writing=True):
            if not self._protocols & _STREAMS:
                self._fs.pipe_file(path, b"".join(parts))
                return
            file = self._fs.open(path, "wb", block_size=PART_BYTES)
            try:
                upload_behind(parts, file.writelines)
            except BaseException:
                file.discard()
                file.closed = True  # otherwise its destructor completes the object
                raise
            file.close()

    def create(self, key: str, data: Data) -> bool:
        if not self.atomic_create:
            return self._create_alone(key, data)
        path = self._path(key)
        with _store_errors(key, writing=True):
            try:
                self._fs.pipe_file(path, bytes(data), mode="create")
            except FileExistsError:
                return False
            except Exception as error:
                if _codes(error) & _EXISTS:
                    return False
                raise
            return True

    def _create_alone(self, key: str, data: Data) -> bool:
        """Check, then write: correct only in the coordinator, the one process that creates
        objects."""
        if not self._sole_creator:
            raise StoreDenied(
                f"{self.uri}: expected a store with an atomic create "
                f"({', '.join(sorted(_ATOMIC_CREATE))}), found "
                f"{'/'.join(sorted(self._protocols))}; only the coordinator can create there"
            )
        try:
            self.get_range(key, 0, 1)
        except MissingKey:
            self.put(key, data)
            return True
        return False

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        if limit is None:
            return self._cat(key)
        return check_size(key, self.get_range(key, 0, max(limit, 0) + 1), limit)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._cat(key, start=start, end=start + length)

    def _cat(self, key: str, **range_: int) -> bytes:
        path = self._path(key)
        with _store_errors(key):
            if self._is_hub:
                self._fs.invalidate_cache(path)  # HfFileSystem takes sizes from a cached listing
            try:
                return bytes(self._fs.cat_file(path, **range_))
            except Exception as error:
                # Services reject a range that starts at or past the end; adlfs requests a range
                # of an empty object even to read all of it.
                if _codes(error) & _PAST_THE_END:
                    return b""
                raise

    def list(self, prefix: str, *, limit: int = LISTED) -> list[ObjectInfo]:
        return join_pages(self.list_pages(prefix), prefix, limit)

    def list_pages(self, prefix: str) -> Pages:
        folder = self._path(prefix.rstrip("/")) if prefix else self._root
        start = len(self._root) + 1
        with _store_errors(prefix):
            try:
                for page in fsspec_pages.pages_of(self._fs, folder, self._refresh):
                    # Some services list the prefix itself.
                    yield [ObjectInfo(p[start:], size) for p, size in page if len(p) > start]
            except FileNotFoundError:
                return

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            with contextlib.suppress(MissingKey), _store_errors(key):
                self._fs.rm_file(path)


def _limit_azure_retries(fs: Any) -> None:
    """Shorten the retries of Azure's client, which last up to a minute by default: longer than
    a heartbeat can wait. adlfs has no option for it. A client without this policy is left
    unchanged."""
    config = getattr(getattr(fs, "service_client", None), "_config", None)
    policy = getattr(config, "retry_policy", None)
    if policy is not None:
        policy.total_retries = AZURE_RETRIES
        policy.initial_backoff = policy.random_jitter_range = AZURE_BACKOFF_S
        policy.increment_base = 2


def _codes(error: BaseException | None) -> set[str]:
    """Return the error codes of S3 and Azure and the HTTP statuses in an exception and all its
    causes."""
    codes: set[str] = set()
    seen: set[int] = set()  # a chain of causes can be cyclic
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        response = getattr(error, "response", None)
        if isinstance(response, dict):  # botocore
            codes.add(str(response.get("Error", {}).get("Code", "")))
        if str(error).startswith("Forbidden: "):  # gcsfs reports a 403 by message only
            codes.add("403")
        values = [getattr(error, name, None) for name in ("status_code", "error_code", "code")]
        values.append(getattr(response, "status_code", None))
        codes.update(str(value) for value in values if isinstance(value, int | str))
        error = error.__cause__ or error.__context__
    return codes


@contextlib.contextmanager
def _store_errors(key: str, *, writing: bool = False) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        codes = _codes(error)
        message = f"{key}: {type(error).__name__}: {error}"
        if codes & _NO_BUCKET or (writing and isinstance(error, FileNotFoundError)):
            raise StoreDenied(f"no such bucket, for {message}") from error
        if isinstance(error, FileNotFoundError) or codes & _MISSING_CODES:
            raise MissingKey(key) from error
        if codes & _DENIED_CODES or isinstance(
            error, PermissionError | ValueError | ImportError | NotImplementedError
        ):
            raise StoreDenied(message) from error
        raise StoreUnavailable(message) from error
