"""A :class:`~diloco.rendezvous.store.Store` over any fsspec file system.

Listings are never cached (a peer's new object must be seen at once) and instances are not shared
(``skip_instance_cache``): s3fs instances must not cross a fork.

What "create" is differs per file system and so do the errors: s3fs answers a lost
``If-None-Match`` race with ``OSError(EINVAL)`` whose cause says ``PreconditionFailed``.
File systems without an atomic create are refused by :meth:`FsspecStore.create` rather than
served by a check-then-write.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from fsspec.core import url_to_fs

from diloco.rendezvous.store import (
    PART_BYTES,
    Data,
    MakeParts,
    MissingKey,
    ObjectInfo,
    StoreDenied,
    StoreUnavailable,
    check_key,
)
from diloco.rendezvous.streaming import StreamedParts, upload_behind

_ATOMIC_CREATE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"})
_STREAMS = _ATOMIC_CREATE - {"memory"}
"""Where an open file is invisible until it is closed, and can be discarded."""
_DENIED_CODES = frozenset(
    {"AccessDenied", "NoSuchBucket", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403"}
)
_MISSING_CODES = frozenset({"NoSuchKey", "404"})


class FsspecStore:
    """Objects under ``uri`` on the file system that fsspec finds for it."""

    def __init__(self, uri: str, *, sole_creator: bool = False) -> None:
        self._sole_creator = sole_creator
        self.uri = uri.rstrip("/")
        try:
            options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
            self._fs, path = url_to_fs(self.uri, **options)
        except (ValueError, ImportError) as error:
            raise StoreDenied(f"{uri}: {error}") from error
        self._root = str(path).rstrip("/")
        protocol = self._fs.protocol
        self._protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self.atomic_create = bool(self._protocols & _ATOMIC_CREATE)

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def put(self, key: str, data: Data) -> None:
        path = self._path(key)
        with _store_errors(key):
            self._fs.pipe_file(path, bytes(data))

    def put_stream(self, key: str, make_parts: MakeParts) -> None:
        StreamedParts(make_parts).pass_to(lambda parts: self._put_parts(key, parts))

    def _put_parts(self, key: str, parts: Iterable[Data]) -> None:
        path = self._path(key)
        with _store_errors(key):
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
        with _store_errors(key):
            try:
                self._fs.pipe_file(path, bytes(data), mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                if _code(error) in ("PreconditionFailed", "412"):
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

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with _store_errors(key):
            return bytes(self._fs.cat_file(path))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        path = self._path(key)
        with _store_errors(key):
            try:
                return bytes(self._fs.cat_file(path, start=start, end=start + length))
            except OSError as error:
                if _code(error) in ("InvalidRange", "416"):
                    return b""  # S3 refuses a range that starts at or past the end
                raise

    def list(self, prefix: str) -> builtins.list[ObjectInfo]:
        folder = self._path(prefix.rstrip("/")) if prefix else self._root
        with _store_errors(prefix):
            try:
                found = self._fs.find(folder, detail=True, withdirs=False)
            except FileNotFoundError:
                return []
        start = len(self._root) + 1
        return sorted(
            (
                ObjectInfo(str(path)[start:], int(info.get("size") or 0))
                for path, info in found.items()
                if len(str(path)) > start  # some stores list the prefix itself
            ),
            key=lambda info: info.key,
        )

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            with contextlib.suppress(MissingKey), _store_errors(key):
                self._fs.rm_file(path)


def _code(error: BaseException | None) -> str:
    """The S3 error code of an exception or of what caused it, '' if there is none."""
    seen: set[int] = set()  # chains of causes may close on themselves
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__ or error.__context__
    return ""


@contextlib.contextmanager
def _store_errors(key: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        if _code(error) == "NoSuchBucket":
            raise StoreDenied(f"{key}: no such bucket") from error
        raise MissingKey(key) from error
    except PermissionError as error:
        raise StoreDenied(f"{key}: {error}") from error
    except Exception as error:
        code = _code(error)
        if code in _MISSING_CODES:
            raise MissingKey(key) from error
        if code in _DENIED_CODES or isinstance(error, ValueError | ImportError):
            raise StoreDenied(f"{key}: {code or type(error).__name__}: {error}") from error
        raise StoreUnavailable(f"{key}: {type(error).__name__}: {error}") from error
