"""The object store: a handful of verbs over a bucket or a folder.

Semantics that every implementation guarantees and ``tests/contracts/test_store.py`` checks:

- ``put`` replaces a whole object atomically; a reader sees the old or the new one, never a mix.
- ``create`` writes only if the key does not exist. Of any number of racing writers exactly one
  gets True. A create whose answer was lost in transit and is repeated by the client library may
  meet its own object: callers put a writer's name in the body and read back when told False.
  A store that has no such operation says ``atomic_create = False``.
- ``put_stream`` writes one object out of parts. Nothing is visible under the key until the last
  part is in; an exception of the iterator ends the upload and propagates unchanged. Parts are
  :data:`PART_BYTES` long, the last one at most so: each is one request, and is uploaded while the
  next is made. The store takes a function, because a stream cannot be rewound for another try;
  it is called, and what it gives is iterated, in the calling thread. A part that was given is
  left as it is until ``put_stream`` has returned.
- ``get`` with a ``limit`` reads hardly more than so many bytes: a larger object, of any size, is
  :class:`ObjectTooLarge`. Records are read with one, as anybody who can write to the bucket can
  replace them; only payloads whose size nothing else bounds are read without.
- ``get``, ``get_range`` and ``list`` see every write that has returned (strong consistency).

Errors: :class:`MissingKey` for a key that is not there; :class:`ObjectTooLarge` for an object
beyond a caller's limit; :class:`StoreUnavailable` where trying
again can help; :class:`StoreDenied` where it cannot (permissions, no such bucket, bad URI).
Anything else an implementation raises is a bug.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import urlsplit

from diloco.rendezvous import folders
from diloco.rendezvous.location import FILE, SCHEMES, BadLocation, canonical, file_uri
from diloco.rendezvous.streaming import StreamedParts

Data = bytes | bytearray | memoryview
MakeParts = Callable[[], Iterable[Data]]

PART_BYTES = 1 << 24
"""Size of one part of a multipart upload and of one ranged read: 16 MiB."""
UPLOADS_IN_FLIGHT = 3
"""Parts of one stream that a store holds at once, at most."""


class StoreError(Exception):
    """Base of what a store raises."""


class MissingKey(StoreError):
    """There is no object under the key."""


class ObjectTooLarge(StoreError):
    """The object is larger than the caller's limit."""

    def __init__(self, key: str, limit: int) -> None:
        super().__init__(f"{key}: expected at most {limit} bytes, found more")
        self.key = key
        self.limit = limit


class StoreUnavailable(StoreError):
    """The store did not answer as it should; trying again can help."""


class StoreDenied(StoreError):
    """The store refused; trying again cannot help until a person changes something."""


@dataclass(frozen=True)
class ObjectInfo:
    key: str
    size_bytes: int


class Store(Protocol):
    uri: str
    atomic_create: bool

    def put(self, key: str, data: Data) -> None: ...

    def put_stream(self, key: str, make_parts: MakeParts) -> None: ...

    def create(self, key: str, data: Data) -> bool: ...

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """A whole object; :class:`ObjectTooLarge` if it has more than ``limit`` bytes."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Up to ``length`` bytes from ``start``; fewer, or none, where the object ends before."""
        ...

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Objects whose key starts with ``prefix`` (which ends in a slash), sorted by key."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; one that is not there is no error."""
        ...


def check_key(key: str) -> str:
    """The key itself; :class:`ValueError` where it could leave the rendezvous prefix, or where a
    client would read part of it as something else."""
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or any(sign in key for sign in "\\?#\0"):
        raise ValueError(f"expected a relative object key, found {key!r}")
    return key


def check_size(key: str, data: bytes, limit: int) -> bytes:
    """``data`` itself; :class:`ObjectTooLarge` if it is longer than ``limit``. For stores, which
    read up to one byte more."""
    if len(data) > limit:
        raise ObjectTooLarge(key, limit)
    return data


def open_store(
    uri: str, *, sole_creator: bool = False, environment: Mapping[str, str] | None = None
) -> Store:
    """The store for a rendezvous URI: ``file://`` or a plain path, or any URI fsspec opens.

    ``sole_creator`` says that this process is the one designated committer of a store without an
    atomic create: there, and only so, its ``create`` looks whether the key exists, then writes.
    ``environment`` has the variables of a credential (:mod:`diloco.rendezvous.store_access`), and
    then nothing of this process's own is used; None means this process's own.
    """
    scheme = urlsplit(uri).scheme
    if SCHEMES.get(scheme, scheme) in ("", FILE):
        if environment is not None:
            raise StoreDenied(f"{uri}: expected a bucket to open with a credential, found a folder")
        try:
            return LocalStore(canonical(uri).folder)
        except BadLocation as error:
            raise StoreDenied(str(error)) from None
    uri = f"{scheme}{uri[len(scheme) :]}"  # in lower case, as clients expect it
    from diloco.rendezvous.remote_store import open_remote

    return open_remote(uri, sole_creator=sole_creator, environment=environment)


class LocalStore:
    """A folder as a bucket, on a local or a POSIX network file system.

    ``put`` renames a finished temporary file into place; ``create`` hard-links it, which fails if
    the name exists: fsspec's own exclusive create on ``file://`` is check-then-write and lets
    several racing writers win.

    The root is resolved once, here. Below it symbolic links are never followed and only regular
    files are objects (:mod:`diloco.rendezvous.folders`): others can write to a shared folder.
    A folder that a deletion leaves empty is removed.
    """

    atomic_create = True

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self.uri = file_uri(self.root)

    @contextlib.contextmanager
    def _written(self, key: str, parts: Iterable[Data]) -> Iterator[tuple[int, str, str]]:
        """The folder of ``key``, and in it the names of the temporary file and of the object."""
        *path, name = check_key(key).split("/")
        temporary = f".{name}.{secrets.token_hex(6)}.tmp"
        with _local_errors(key):
            folder, file = folders.new_file(self.root, path, temporary)
            try:
                with os.fdopen(file, "wb") as written:
                    for part in parts:
                        written.write(part)
                    written.flush()
                    os.fsync(written.fileno())
                yield folder, temporary, name
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=folder)
                os.close(folder)

    def put(self, key: str, data: Data) -> None:
        self._put(key, [data])

    def put_stream(self, key: str, make_parts: MakeParts) -> None:
        StreamedParts(make_parts).pass_to(lambda parts: self._put(key, parts))

    def _put(self, key: str, parts: Iterable[Data]) -> None:
        with self._written(key, parts) as (folder, temporary, name):
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)

    def create(self, key: str, data: Data) -> bool:
        with self._written(key, [data]) as (folder, temporary, name):
            try:
                os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except FileExistsError:
                return False
            return True

    def _opened(self, key: str) -> BinaryIO:
        return folders.open_file(self.root, check_key(key).split("/"))

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        with _local_errors(key), self._opened(key) as file:
            if limit is None:
                return file.read()
            # Not the limit: as much memory is reserved as may be read.
            size_bytes = min(os.fstat(file.fileno()).st_size, max(limit, 0))
            return check_size(key, file.read(size_bytes + 1), limit)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with _local_errors(key), self._opened(key) as file:
            file.seek(start)
            return file.read(length)

    def list(self, prefix: str) -> list[ObjectInfo]:
        return sorted(self._listed(prefix), key=lambda info: info.key)

    def list_some(self, limit: int) -> builtins.list[ObjectInfo]:
        """At most ``limit`` objects, without reading all of a large folder."""
        return sorted(islice(self._listed(""), limit), key=lambda info: info.key)

    def _listed(self, prefix: str) -> Iterator[ObjectInfo]:
        path = check_key(prefix.rstrip("/")).split("/") if prefix else []
        with _local_errors(prefix):
            for key, size_bytes in folders.walk(self.root, path):
                name = key.rpartition("/")[2]
                if not (name.startswith(".") and name.endswith(".tmp")):
                    yield ObjectInfo(key, size_bytes)

    def delete(self, keys: Iterable[str]) -> None:
        emptied: set[tuple[str, ...]] = set()
        for key in keys:
            path = check_key(key).split("/")
            with _local_errors(key), contextlib.suppress(FileNotFoundError):
                folders.remove_file(self.root, path)
                emptied.add(tuple(path[:-1]))
        for folder in emptied:
            folders.remove_empty(self.root, folder)

    def remove_leftovers(
        self, is_key: Callable[[str], object], is_folder: Callable[[str], bool]
    ) -> None:
        """When no process uses it any more: remove the temporary files of objects that ``is_key``
        knows, the empty folders that ``is_folder`` knows, and the root, if nothing is left."""
        with _local_errors(""):
            for key, _ in builtins.list(folders.walk(self.root, [])):
                folder, slash, name = key.rpartition("/")
                match = _TEMPORARY.fullmatch(name)
                if match and is_key(f"{folder}{slash}{match[1]}"):
                    folders.remove_file(self.root, key.split("/"))
            folders.remove_empty_tree(self.root, is_folder)


_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{12}\.tmp", re.DOTALL)
_DENIED_ERRNOS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
    | {errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EINVAL, errno.ENAMETOOLONG}
)


@contextlib.contextmanager
def _local_errors(key: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise MissingKey(key) from error
    except OSError as error:
        if error.errno in _DENIED_ERRNOS:
            raise StoreDenied(f"{key}: {error.strerror} ({error.filename})") from error
        raise StoreUnavailable(f"{key}: {error}") from error


@dataclass
class StoreUsage:
    """Requests and bytes of a :class:`MeteredStore` since it was made."""

    requests: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class MeteredStore:
    """Counts what goes through a store, for telemetry and for ``bench/``; by many threads."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.uri = inner.uri
        self.atomic_create = inner.atomic_create
        self.usage = StoreUsage()
        self._lock = threading.Lock()

    def put(self, key: str, data: Data) -> None:
        self.inner.put(key, data)
        self._count(up=len(data))

    def put_stream(self, key: str, make_parts: MakeParts) -> None:
        """One part is one request; more are one each, and two to begin and to complete."""
        sizes: list[int] = []

        def parts() -> Iterator[Data]:
            sizes.clear()
            for part in make_parts():
                sizes.append(len(part))
                yield part

        self.inner.put_stream(key, parts)
        self._count(len(sizes) + 2 if len(sizes) > 1 else 1, up=sum(sizes))

    def create(self, key: str, data: Data) -> bool:
        created = self.inner.create(key, data)
        self._count(up=len(data))
        return created

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        self._count()
        data = self.inner.get(key, limit=limit)
        self._count(0, down=len(data))
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._count()
        data = self.inner.get_range(key, start, length)
        self._count(0, down=len(data))
        return data

    def list(self, prefix: str) -> list[ObjectInfo]:
        self._count()
        return self.inner.list(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        self._count()
        self.inner.delete(keys)

    def _count(self, requests: int = 1, *, up: int = 0, down: int = 0) -> None:
        with self._lock:
            self.usage.requests += requests
            self.usage.bytes_up += up
            self.usage.bytes_down += down
