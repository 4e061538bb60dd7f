"""Files below a folder that others can write to, opened without following symbolic links.

Paths are walked one name at a time. Each folder is opened relative to the previous one with
``O_NOFOLLOW``, so neither a link nor a folder that is concurrently replaced by a link can lead out
of the root. Files are opened with ``O_NONBLOCK`` and read only if they are regular: opening a FIFO
would block, and a device can have side effects. A hard link is a regular file and cannot be
distinguished; creating one requires access to the target file.

Errors are ``OSError``: ``ENOTDIR`` or ``ELOOP`` for a link, and :class:`NotRegular` where a regular
file is expected. A FIFO or a file at the path of a protocol folder, and a folder at the path of a
file to be written, are renamed, so that they cannot block a command from being written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import BinaryIO

FOLDERS = frozenset(
    {
        "checkpoints",
        "code",
        "control",
        "evaluations",
        "final",
        "members",
        "packs",
        "preflight",
        "units",
        "rounds",
        "state",
        "telemetry",
    }
)
"""Top-level folders of a rendezvous."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PASS = os.O_PATH | _FOLDER if hasattr(os, "O_PATH") else None
"""Flags for opening an intermediate folder, which needs no permission to list it."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES = 100
"""Attempts to create a file in a folder that others remove because it is empty."""
_DEEPEST = 32
"""Maximum nesting that :func:`walk` enters; a key of the protocol has at most five parts."""


class NotRegular(OSError):
    """The path names a folder, a FIFO, a socket, a device or a link where a file is expected."""


def open_folder(root: Path, path: Sequence[str], *, make: bool = False) -> int:
    """Return a descriptor of the folder at ``path`` below ``root``; the caller closes it. ``make``
    creates missing folders."""
    folder = _open_made_root(root) if make else _open_root(root)
    for depth, name in enumerate(path):
        try:
            try:
                inner = os.open(name, _FOLDER, dir_fd=folder)
            except FileNotFoundError:
                if not make:
                    raise
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=folder)
                inner = os.open(name, _FOLDER, dir_fd=folder)
            except NotADirectoryError:
                if not make or not _is_movable(_mode(name, folder), "/".join(path[: depth + 1])):
                    raise
                move_aside(name, folder)
                os.mkdir(name, dir_fd=folder)
                inner = os.open(name, _FOLDER, dir_fd=folder)
        finally:
            os.close(folder)
        folder = inner
    return folder


def _mode(name: str, folder: int) -> int:
    return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode


def _is_movable(mode: int, path: str) -> bool:
    """Return whether an entry can be renamed. A link is refused, and a file at a path that is not a
    protocol folder can be an object of another program."""
    return not stat.S_ISLNK(mode) and (not stat.S_ISREG(mode) or path.split("/")[0] in FOLDERS)


def move_aside(name: str, folder: int) -> None:
    """Rename the entry ``name`` to a name that no key of the protocol has."""
    renamed = f".{name[:200]}.{secrets.token_hex(6)}.odd"
    with contextlib.suppress(FileNotFoundError):
        os.rename(name, renamed, src_dir_fd=folder, dst_dir_fd=folder)


def replace_file(temporary: str, name: str, folder: int) -> None:
    """Rename a file of ``folder`` over any entry called ``name``."""
    try:
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except IsADirectoryError:
        move_aside(name, folder)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def _open_root(root: Path) -> int:
    """Open the root without following links on the way: they were resolved when the store was
    opened, so a link was added later. Without ``O_PATH`` only the last name is checked."""
    if _PASS is None or not root.is_absolute():
        return os.open(root, _FOLDER)
    *above, last = str(root)[1:].split("/")
    folder = os.open("/", _PASS)
    for name in above:
        folder = _open_inner(name, _PASS, folder)
    return _open_inner(last or ".", _FOLDER, folder)


def _open_inner(name: str, flags: int, folder: int) -> int:
    """Open ``name`` in ``folder``, and close ``folder``."""
    try:
        return os.open(name, flags, dir_fd=folder)
    finally:
        os.close(folder)


def _open_made_root(root: Path) -> int:
    try:
        return _open_root(root)
    except FileNotFoundError:
        root.mkdir(parents=True, exist_ok=True)
        return _open_root(root)


def new_file(root: Path, path: Sequence[str], name: str) -> tuple[int, int]:
    """Return descriptors of the folder at ``path``, created if missing, and of a new file in it.
    The caller closes both."""
    for attempt in range(_TRIES):
        try:
            folder = open_folder(root, path, make=True)
            try:
                return folder, os.open(name, _NEW, 0o666, dir_fd=folder)
            except BaseException:
                os.close(folder)
                raise
        except FileNotFoundError:  # another process removed the folder between two steps
            if attempt == _TRIES - 1:
                raise
    raise AssertionError("unreachable")


def open_file(root: Path, path: Sequence[str]) -> BinaryIO:
    """Open the regular file at ``path`` for reading."""
    folder = open_folder(root, path[:-1])
    try:
        descriptor = os.open(path[-1], _READ, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):  # a link, a socket, a device
            raise NotRegular(error.errno, error.strerror, path[-1]) from error
        raise
    finally:
        os.close(folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotRegular(errno.EINVAL, "expected a regular file, found another kind", path[-1])
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


Entries = Generator[tuple[str, int | None], None, None]


def walk(root: Path, path: Sequence[str]) -> Entries:
    """Yield key and size of every regular file at or below the folder ``path``, unsorted. Folders
    are yielded with size None, so that a caller can count them.

    Skips entries that are removed meanwhile, entries that are neither folder nor regular file, and
    levels deeper than :data:`_DEEPEST`.
    """
    try:
        folder = open_folder(root, path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if error.errno == errno.ELOOP:
            return
        raise
    try:
        yield from _walk(folder, "".join(f"{name}/" for name in path), _DEEPEST)
    finally:
        os.close(folder)


def _walk(folder: int, prefix: str, depth: int) -> Entries:
    inner: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                inner.append(entry.name)
                yield f"{prefix}{entry.name}", None
            elif entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    yield f"{prefix}{entry.name}", entry.stat(follow_symlinks=False).st_size
    for name in inner if depth else ():
        try:
            child = os.open(name, _FOLDER, dir_fd=folder)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            if error.errno == errno.ELOOP:
                continue
            raise
        try:
            yield from _walk(child, f"{prefix}{name}/", depth - 1)
        finally:
            os.close(child)


def remove_file(root: Path, path: Sequence[str]) -> None:
    """Remove the name at ``path``, not the target of a link. A missing file is not an error."""
    folder = open_folder(root, path[:-1])
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path[-1], dir_fd=folder)
    finally:
        os.close(folder)


def remove_empty(root: Path, path: Sequence[str]) -> None:
    """Remove the folder at ``path`` and its parents below the root, as far as they are empty."""
    for count in range(len(path), 0, -1):
        try:
            folder = open_folder(root, path[: count - 1])
        except OSError:
            continue
        try:
            os.rmdir(path[count - 1], dir_fd=folder)
        except FileNotFoundError:
            continue
        except OSError:
            return
        finally:
            os.close(folder)


def remove_empty_tree(root: Path, is_own: Callable[[str], bool]) -> None:
    """Remove the empty folders below ``root`` whose path satisfies ``is_own``, innermost first,
    then the root itself if it is empty."""
    try:
        folder = open_folder(root, [])
    except OSError:
        return
    try:
        _remove_empty_tree(folder, "", is_own, _DEEPEST)
    finally:
        os.close(folder)
    with contextlib.suppress(OSError):
        root.rmdir()


def _remove_empty_tree(folder: int, prefix: str, is_own: Callable[[str], bool], depth: int) -> None:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    for name in names:
        if not depth or not is_own(f"{prefix}{name}"):
            continue
        with contextlib.suppress(OSError):
            child = os.open(name, _FOLDER, dir_fd=folder)
            try:
                _remove_empty_tree(child, f"{prefix}{name}/", is_own, depth - 1)
            finally:
                os.close(child)
            os.rmdir(name, dir_fd=folder)
