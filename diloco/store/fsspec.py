"""A :class:`~diloco.store.base.Store` over any fsspec file system.

Listings are never cached (a peer's new object must be seen at once) and instances are not shared
(``skip_instance_cache``): s3fs instances must not cross a fork.

What "create" is differs per file system and so do the errors: s3fs answers a lost
``If-None-Match`` race with ``OSError(EINVAL)`` whose cause says ``PreconditionFailed``.
File systems without an atomic create are refused by :meth:`FsspecStore.create` rather than
served by a check-then-write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fsspec.core import url_to_fs

from diloco.store import credentials, fsspec_pages
from diloco.store.base import (
    LISTED,
    PART_BYTES,
    Data,
    MakeParts,
    MissingKey,
    ObjectInfo,
    Pages,
    StoreDenied,
    StoreUnavailable,
    check_key,
    check_size,
    join_pages,
)
from diloco.store.multipart import StreamedParts, upload_behind

AZURE_RETRIES = 2
AZURE_BACKOFF_S = 0.5

_ATOMIC_CREATE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"})
_STREAMS = _ATOMIC_CREATE - {"memory"}
"""Where an open file is invisible until it is closed, and can be discarded."""
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound"})
_DENIED_CODES = frozenset(
    {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "PermanentRedirect"}
    | {"400", "401", "403", "405", "411", "413", "501"}
)
_MISSING_CODES = frozenset({"NoSuchKey", "BlobNotFound", "404"})
_PAST_THE_END = frozenset({"InvalidRange", "416"})
_EXISTS = frozenset({"PreconditionFailed", "BlobAlreadyExists", "412"})


class FsspecStore:
    """Objects under ``uri`` on the file system that fsspec finds for it."""

    def __init__(
        self,
        uri: str,
        *,
        sole_creator: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._sole_creator = sole_creator
        self.uri = uri.rstrip("/")
        own = {} if environment is None else credentials.fsspec_options(uri, environment)
        try:
            options = {"skip_instance_cache": True, "use_listings_cache": False, **own}
            self._fs, path = url_to_fs(self.uri, **options)
        except (ValueError, ImportError) as error:
            raise StoreDenied(f"{uri}: {error}") from error
        credentials.check_used(self._fs, own)
        _bound_azures_retries(self._fs)
        self._root = str(path).rstrip("/")
        protocol = self._fs.protocol
        self._protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self._is_hub = "hf" in self._protocols
        self._fresh = {"refresh": True} if self._is_hub else {}
        self.atomic_create = bool(self._protocols & _ATOMIC_CREATE)

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def put(self, key: str, data: Data) -> None:
        path = self._path(key)
        with _store_errors(key, writing=True):
            self._fs.pipe_file(path, bytes(data))

    def put_stream(self, key: str, make_parts: MakeParts) -> None:
        StreamedParts(make_parts).pass_to(lambda parts: self._put_parts(key, parts))

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
                file.closed = True  # else its destructor would complete the object
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
        """Check, then write: right for one writer only, who was told to be the one."""
        if not self._sole_creator:
            raise StoreDenied(
                f"{self.uri}: expected a store with an atomic create "
                f"({', '.join(sorted(_ATOMIC_CREATE))}), found "
                f"{'/'.join(sorted(self._protocols))}; there only the designated committer creates"
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
                self._fs.invalidate_cache(path)  # its sizes come out of a listing it keeps
            try:
                return bytes(self._fs.cat_file(path, **range_))
            except Exception as error:
                # What starts at or past the end is refused; adlfs asks for a range of an empty
                # object even when it reads all of it.
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
                for page in fsspec_pages.pages_of(self._fs, folder, self._fresh):
                    # Some stores list the prefix itself.
                    yield [ObjectInfo(p[start:], size) for p, size in page if len(p) > start]
            except FileNotFoundError:
                return

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            with contextlib.suppress(MissingKey), _store_errors(key):
                self._fs.rm_file(path)


def _bound_azures_retries(fs: Any) -> None:
    """Azure's client tries again for a minute by default, longer than a beat may wait; adlfs has
    no option for it. Another client, or another version of this one, is left as it is."""
    config = getattr(getattr(fs, "service_client", None), "_config", None)
    policy = getattr(config, "retry_policy", None)
    if policy is not None:
        policy.total_retries = AZURE_RETRIES
        policy.initial_backoff = policy.random_jitter_range = AZURE_BACKOFF_S
        policy.increment_base = 2


def _codes(error: BaseException | None) -> set[str]:
    """What the services said, by an exception and all that caused it: error codes of S3 and Azure,
    HTTP statuses of any."""
    found: set[str] = set()
    seen: set[int] = set()  # chains of causes may close on themselves
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        response = getattr(error, "response", None)
        if isinstance(response, dict):  # botocore
            found.add(str(response.get("Error", {}).get("Code", "")))
        if str(error).startswith("Forbidden: "):  # all that gcsfs makes of a 403
            found.add("403")
        said = [getattr(error, name, None) for name in ("status_code", "error_code", "code")]
        said.append(getattr(response, "status_code", None))
        found.update(str(one) for one in said if isinstance(one, int | str))
        error = error.__cause__ or error.__context__
    return found


@contextlib.contextmanager
def _store_errors(key: str, *, writing: bool = False) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        codes = _codes(error)
        said = f"{key}: {type(error).__name__}: {error}"
        if codes & _NO_BUCKET or (writing and isinstance(error, FileNotFoundError)):
            raise StoreDenied(f"no such bucket, for {said}") from error
        if isinstance(error, FileNotFoundError) or codes & _MISSING_CODES:
            raise MissingKey(key) from error
        if codes & _DENIED_CODES or isinstance(
            error, PermissionError | ValueError | ImportError | NotImplementedError
        ):
            raise StoreDenied(said) from error
        raise StoreUnavailable(said) from error
