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
- ``list`` reads hardly more than ``limit`` objects: a prefix that holds more is
  :class:`ListingTooLong`. Any writer of the bucket can add objects, so no listing is without a
  limit. ``list_pages`` is for callers that work page by page: a page has about
  :data:`PAGE_OBJECTS` objects, is read when it is asked for, and objects of pages that were read
  can be deleted meanwhile. A client that cannot page gives one page.
- ``get``, ``get_range`` and ``list`` see every write that has returned (strong consistency).

On a file system a key can name what is no object. Reading it is :class:`NotAnObject`, at once;
``put`` replaces it; ``create`` returns False, as for an object.

Errors: :class:`MissingKey` for a key that is not there; :class:`ObjectTooLarge` for an object
beyond a caller's limit, :class:`ListingTooLong` for a listing beyond it;
:class:`StoreUnavailable` where trying
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
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol

from diloco.store import folders
from diloco.store.location import file_uri
from diloco.store.multipart import StreamedParts

Data = bytes | bytearray | memoryview
MakeParts = Callable[[], Iterable[Data]]

PART_BYTES = 1 << 24
"""Size of one part of a multipart upload and of one ranged read: 16 MiB."""
UPLOADS_IN_FLIGHT = 3
"""Parts of one stream that a store holds at once, at most."""
PAGE_OBJECTS = 1000
"""Objects of one page of a listing, as S3 has them."""
LISTED = 100_000
"""Objects of one listing, unless a caller sets another limit. The leases of a group of a thousand
replicas that were started a hundred times each are as many."""
_FOLDERS_PER_OBJECT = 4
"""Folders of a listing on a file system, which have no object of their own."""


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


class ListingTooLong(StoreError):
    """More objects lie under a prefix than the caller's limit, or than can be listed in time. The
    store works: this says something of the prefix only."""

    def __init__(self, prefix: str, reason: str) -> None:
        super().__init__(f"{prefix or 'all objects'}: {reason}")
        self.prefix = prefix

    @classmethod
    def beyond(cls, limit: int, prefix: str) -> ListingTooLong:
        return cls(prefix, f"expected at most {limit} objects, found more")


class StoreUnavailable(StoreError):
    """The store did not answer as it should; trying again can help."""


class StoreDenied(StoreError):
    """The store refused; trying again cannot help until a person changes something."""


class NotAnObject(StoreDenied):
    """Something lies under the key that is no object, such as a FIFO or a folder on a file system.
    For a reader it is a record that cannot be read."""


@dataclass(frozen=True)
class ObjectInfo:
    key: str
    size_bytes: int


Pages = Generator[list[ObjectInfo], None, None]


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

    def list(self, prefix: str, *, limit: int = LISTED) -> list[ObjectInfo]:
        """Objects whose key starts with ``prefix`` (which ends in a slash), sorted by key;
        :class:`ListingTooLong` if there are more than ``limit``."""
        ...

    def list_pages(self, prefix: str) -> Pages:
        """The same objects, a page at a time and in no order."""
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


def join_pages(pages: Pages, prefix: str, limit: int) -> list[ObjectInfo]:
    """The objects of all pages, sorted by key; :class:`ListingTooLong` if there are more than
    ``limit``. For stores."""
    found: list[ObjectInfo] = []
    with contextlib.closing(pages):
        for page in pages:
            found += page
            if len(found) > limit:
                raise ListingTooLong.beyond(limit, prefix)
    return sorted(found, key=lambda info: info.key)


def first_objects(store: Store, limit: int) -> list[ObjectInfo]:
    """At most ``limit`` objects of a store, without reading all of many, sorted by key."""
    with contextlib.closing(store.list_pages("")) as pages:
        found = list(islice((info for page in pages for info in page), limit))
    return sorted(found, key=lambda info: info.key)


class LocalStore:
    """A folder as a bucket, on a local or a POSIX network file system.

    ``put`` renames a finished temporary file into place; ``create`` hard-links it, which fails if
    the name exists: fsspec's own exclusive create on ``file://`` is check-then-write and lets
    several racing writers win.

    The root is resolved once, here. Below it symbolic links are never followed and only regular
    files are objects (:mod:`diloco.store.folders`): others can write to a shared folder.
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
            folders.replace_file(temporary, name, folder)

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

    def list(self, prefix: str, *, limit: int = LISTED) -> list[ObjectInfo]:
        return join_pages(self._pages(prefix, _FOLDERS_PER_OBJECT * limit), prefix, limit)

    def list_pages(self, prefix: str) -> Pages:
        return self._pages(prefix, None)

    def _pages(self, prefix: str, limit: int | None) -> Pages:
        """:class:`ListingTooLong` where more than ``limit`` folders and temporary files are met: a
        page ends after :data:`PAGE_OBJECTS` entries of any kind."""
        path = check_key(prefix.rstrip("/")).split("/") if prefix else []
        page: builtins.list[ObjectInfo] = []
        met = others = 0
        with _local_errors(prefix), contextlib.closing(folders.walk(self.root, path)) as entries:
            for key, size_bytes in entries:
                met += 1
                name = key.rpartition("/")[2]
                if size_bytes is None or (name.startswith(".") and name.endswith(".tmp")):
                    others += 1
                else:
                    page.append(ObjectInfo(key, size_bytes))
                if limit is not None and others > limit:
                    raise ListingTooLong(
                        prefix, f"expected at most {limit} folders and temporary files, found more"
                    )
                if met % PAGE_OBJECTS == 0:
                    yield page
                    page = []
        yield page

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
            for key, size_bytes in builtins.list(folders.walk(self.root, [])):
                if size_bytes is None:
                    continue
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
    except folders.NotRegular as error:
        raise NotAnObject(f"{key}: {error.strerror}") from error
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

    def list(self, prefix: str, *, limit: int = LISTED) -> list[ObjectInfo]:
        self._count()
        return self.inner.list(prefix, limit=limit)

    def list_pages(self, prefix: str) -> Pages:
        for page in self.inner.list_pages(prefix):
            self._count()
            yield page

    def delete(self, keys: Iterable[str]) -> None:
        self._count()
        self.inner.delete(keys)

    def _count(self, requests: int = 1, *, up: int = 0, down: int = 0) -> None:
        with self._lock:
            self.usage.requests += requests
            self.usage.bytes_up += up
            self.usage.bytes_down += down
