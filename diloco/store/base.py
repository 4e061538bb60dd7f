"""The object store protocol, its exceptions, and the implementation on a folder.

Every implementation guarantees the following semantics; ``tests/contracts/test_store.py`` checks
them:

- ``put`` replaces a whole object atomically. A reader sees the old or the new object, never a mix.
- ``create`` writes only if the key does not exist. Exactly one of several racing writers gets True.
  If the response to a successful create is lost and the client library retries it, the retry meets
  its own object. Callers therefore put the writer's name into the body and read the object back
  when ``create`` returns False. A store without a conditional write has ``atomic_create = False``.
- ``put_stream`` writes one object from parts. The object becomes visible after the last part; an
  exception of the iterator aborts the upload and propagates unchanged. Each part has
  :data:`PART_BYTES` bytes, the last one at most that many. A part is one request and is uploaded
  while the next one is produced. The argument is a function because a retry needs the parts from
  the beginning; the function is called, and its result iterated, in the calling thread. A part must
  not be modified until ``put_stream`` returns. ``size_bytes``, the size of the object if the caller
  knows it, is a hint for the number of parts in flight.
- ``get`` with a ``limit`` reads little more than ``limit`` bytes and raises :class:`ObjectTooLarge`
  for a larger object. Any writer of the bucket can replace a record, so records are always read
  with a limit. Only payloads whose size is bounded by nothing else are read without one.
- ``list`` reads little more than ``limit`` objects and raises :class:`ListingTooLong` for a longer
  listing. Any writer of the bucket can add objects, so every listing has a limit. ``list_pages``
  serves callers that work page by page: a page has about :data:`PAGE_OBJECTS` objects and is
  fetched when the caller advances to it. Objects of earlier pages can be deleted in the meantime. A
  client without paging yields one page.
- ``get``, ``get_range`` and ``list`` see every write that has returned (strong consistency).

On a file system a key can name something other than a regular file. Reading it raises
:class:`NotAnObject` at once; ``put`` replaces it; ``create`` returns False, as for an existing
object.

Errors: :class:`MissingKey` for a key without an object, :class:`ObjectTooLarge` and
:class:`ListingTooLong` for results beyond the caller's limit, :class:`StoreUnavailable` for errors
that a retry can fix, :class:`StoreDenied` for errors that it cannot (permissions, missing bucket,
bad URI). Any other exception of an implementation is a bug.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol

from diloco.store import folders
from diloco.store.location import file_uri
from diloco.store.multipart import Data as Data
from diloco.store.multipart import MakeParts as MakeParts
from diloco.store.multipart import StreamedParts

PART_BYTES = 1 << 24
"""Size of one part of a multipart upload and of one ranged read: 16 MiB."""
PAGE_OBJECTS = 1000
"""Objects per page of a listing; the maximum of S3."""
LISTED = 100_000
"""Default limit of a listing: the leases of a group of a thousand replicas, each started a hundred
times."""
_FOLDERS_PER_OBJECT = 4
"""Folders that a listing on a file system can visit for each object of its limit."""


class StoreError(Exception):
    """Base class of the exceptions of a store."""


class MissingKey(StoreError):
    """There is no object under the key."""


class ObjectTooLarge(StoreError):
    """The object is larger than the caller's limit."""

    def __init__(self, key: str, limit: int) -> None:
        super().__init__(f"{key}: expected at most {limit} bytes, found more")
        self.key = key
        self.limit = limit


class ListingTooLong(StoreError):
    """A prefix holds more objects than the caller's limit, or than can be listed in time. The store
    itself works."""

    def __init__(self, prefix: str, reason: str) -> None:
        super().__init__(f"{prefix or 'all objects'}: {reason}")
        self.prefix = prefix

    @classmethod
    def beyond(cls, limit: int, prefix: str) -> ListingTooLong:
        return cls(prefix, f"expected at most {limit} objects, found more")


class StoreUnavailable(StoreError):
    """The request failed in a way that a retry can fix."""


class StoreDenied(StoreError):
    """The store refused the request; a retry cannot succeed until the operator changes
    something."""


class CannotOpen(StoreDenied):
    """The URI names no store that this installation can open; the message has the remedy."""


class NotAnObject(StoreDenied):
    """The key names something other than an object, such as a FIFO or a folder on a file system.
    Readers handle it as an unreadable record."""


@dataclass(frozen=True)
class ObjectInfo:
    """One entry of a listing."""

    key: str
    size_bytes: int


Pages = Generator[list[ObjectInfo], None, None]


class Store(Protocol):
    """Operations on the objects of one bucket or folder; the module describes their semantics.

    ``uri`` is the prefix that keys are relative to. ``atomic_create`` is True if racing ``create``
    calls have exactly one winner.
    """

    uri: str
    atomic_create: bool

    def put(self, key: str, data: Data) -> None:
        """Replace the object under ``key`` atomically."""
        ...

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        """Write one object from the parts that ``make_parts`` yields."""
        ...

    def create(self, key: str, data: Data) -> bool:
        """Write the object if ``key`` has none, and return whether it was written."""
        ...

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """Return a whole object. Raises :class:`ObjectTooLarge` if it has more than ``limit``
        bytes."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return up to ``length`` bytes from offset ``start``; fewer, or none, where the object
        ends earlier."""
        ...

    def list(self, prefix: str, *, limit: int = LISTED) -> list[ObjectInfo]:
        """Return the objects whose key starts with ``prefix`` (which ends in a slash), sorted by
        key. Raises :class:`ListingTooLong` if there are more than ``limit``."""
        ...

    def list_pages(self, prefix: str) -> Pages:
        """Yield the same objects one page at a time, unsorted."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. A missing key is not an error."""
        ...


def exists(store: Store, key: str) -> bool:
    """Return whether there is an object under ``key``."""
    try:
        store.get_range(key, 0, 1)
    except MissingKey:
        return False
    return True


def check_key(key: str) -> str:
    """Return ``key``. Raises :class:`ValueError` if it can leave the rendezvous prefix, or if a
    client would parse part of it as something else."""
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or any(sign in key for sign in "\\?#\0"):
        raise ValueError(f"expected a relative object key, found {key!r}")
    return key


def check_size(key: str, data: bytes, limit: int) -> bytes:
    """Return ``data``. Raises :class:`ObjectTooLarge` if it is longer than ``limit``. For stores
    that read up to one byte more than the limit."""
    if len(data) > limit:
        raise ObjectTooLarge(key, limit)
    return data


def join_pages(pages: Pages, prefix: str, limit: int) -> list[ObjectInfo]:
    """Return the objects of all pages, sorted by key. Raises :class:`ListingTooLong` if there are
    more than ``limit``."""
    objects: list[ObjectInfo] = []
    with contextlib.closing(pages):
        for page in pages:
            objects += page
            if len(objects) > limit:
                raise ListingTooLong.beyond(limit, prefix)
    return sorted(objects, key=lambda info: info.key)


def first_objects(store: Store, limit: int) -> list[ObjectInfo]:
    """Return at most ``limit`` objects of a store, sorted by key, without listing the rest."""
    with contextlib.closing(store.list_pages("")) as pages:
        objects = list(islice((info for page in pages for info in page), limit))
    return sorted(objects, key=lambda info: info.key)


class LocalStore:
    """A folder as a bucket, on a local or a POSIX network file system.

    ``put`` renames a finished temporary file into place. ``create`` hard-links it, which fails if
    the name exists; fsspec's exclusive create on ``file://`` checks and then writes, so several
    racing writers can win.

    The constructor resolves the root once. Below it, symbolic links are never followed and only
    regular files are objects (:mod:`diloco.store.folders`), because others can write to a shared
    folder. A folder that a deletion leaves empty is removed.
    """

    atomic_create = True

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self.uri = file_uri(self.root)

    @contextlib.contextmanager
    def _written(self, key: str, parts: Iterable[Data]) -> Iterator[tuple[int, str, str]]:
        """Write a temporary file, and yield the descriptor of the folder of ``key``, the temporary
        file's name and the object's name."""
        *path, name = check_key(key).split("/")
        temporary = f".{name}.{secrets.token_hex(6)}.tmp"
        with _local_errors(key):
            folder, file = folders.new_file(self.root, path, temporary)
            try:
                with os.fdopen(file, "wb") as target:
                    for part in parts:
                        target.write(part)
                    target.flush()
                    os.fsync(target.fileno())
                yield folder, temporary, name
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=folder)
                os.close(folder)

    def put(self, key: str, data: Data) -> None:
        self._put(key, [data])

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        StreamedParts(make_parts).upload_with(lambda parts: self._put(key, parts))

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
            # Not the limit: `read` reserves as much memory as it can read.
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
        """Yield the objects below ``prefix``; a page ends after :data:`PAGE_OBJECTS` entries of any
        kind.

        Raises :class:`ListingTooLong` after ``limit`` folders and temporary files.
        """
        path = check_key(prefix.rstrip("/")).split("/") if prefix else []
        page: builtins.list[ObjectInfo] = []
        visited = others = 0
        with _local_errors(prefix), contextlib.closing(folders.walk(self.root, path)) as entries:
            for key, size_bytes in entries:
                visited += 1
                name = key.rpartition("/")[2]
                if size_bytes is None or (name.startswith(".") and name.endswith(".tmp")):
                    others += 1
                else:
                    page.append(ObjectInfo(key, size_bytes))
                if limit is not None and others > limit:
                    raise ListingTooLong(
                        prefix, f"expected at most {limit} folders and temporary files, found more"
                    )
                if visited % PAGE_OBJECTS == 0:
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
        """Remove what crashed writers left in a folder that no process uses any more: temporary
        files whose object satisfies ``is_key``, empty folders that satisfy ``is_folder``, and the
        root if it is empty."""
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
