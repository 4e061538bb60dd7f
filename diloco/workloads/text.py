"""Text as bytes: this replica's shard of the training text and the held-out windows.

A source is :data:`~diloco.protocol.workload.STDLIB` or any fsspec URI of a file, a folder or a
glob. The files in order of name, put end to end, are one long text:

- *held out* are the files whose hashed name says so (about one in twenty), so that a file is held
  out wherever it is found; where that takes too little or too much, as with a single file, the last
  twentieth of every file is. No byte of it is ever in a shard.
- the rest is cut into blocks dealt out like cards, so that shards are disjoint, equally big and
  alike, whatever the number of files.

Only the shard and the evaluation windows are read, as uint8; a big file is read by ranges.

Left out: decompression, tokenizers, shuffling (batches pick random windows) and texts whose shard
is bigger than memory. Errors: :class:`SettingsError` on the field ``data``, with what was expected
and what was found.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from diloco.protocol.settings import SettingsError
from diloco.protocol.workload import STDLIB

Bytes = npt.NDArray[np.uint8]

HELD_OUT = 1 / 20
"""Fraction of the text that is never trained on."""

_NOT_SOURCE = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_GENERATED = frozenset({"encodings", "pydoc_data"})
"""Tables and one file of 0.75 MB that would be most of the held-out text."""
_MIN_BLOCK, _MAX_BLOCK, _BLOCKS_PER_SHARD = 1 << 12, 1 << 23, 64
_WHOLE_FILE = 1 << 23
"""Files up to this many bytes are read at once, bigger ones by ranges."""
_REQUESTS_AT_ONCE = 32


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """``train``: one shard, (bytes,) uint8. ``held_out``: windows, (windows, context + 1) uint8.

    ``text_bytes`` is the size of the whole text, all shards and held-out part together.
    """

    train: Bytes
    held_out: Bytes
    text_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Extent:
    """``length`` bytes of a file from ``start``."""

    path: str
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class TextFile:
    path: str
    name: str
    size: int

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:4], "big") < HELD_OUT * 2**32

    def extent(self, start: int, end: int) -> _Extent:
        return _Extent(path=self.path, start=start, length=end - start)


def load_corpus(source: str, *, shard: int, shards: int, context: int, eval_bytes: int) -> Corpus:
    """Shard ``shard`` of ``shards`` and windows of ``context + 1`` bytes for ``eval_bytes`` tokens.

    Every process that sees the same files gets the same windows, and shards that never overlap.
    """
    assert 0 <= shard < shards, (shard, shards)
    fs, files = find_files(source)
    train_part, held_out_part = _split(files)
    train, held_out = _Text(source, fs, train_part), _Text(source, fs, held_out_part)
    text_bytes = sum(file.size for file in files)
    needed = (context + 1) * shards
    if train.size < needed or held_out.size < context + 1:
        raise SettingsError(
            "data",
            f"expected at least {max(needed, round((context + 1) / HELD_OUT)):,} bytes of text for "
            f"{shards} shards and a held-out part, in windows of {context + 1} bytes, "
            f"found {text_bytes:,} bytes in {len(files):,} files at {source!r}",
        )
    return Corpus(
        train=train.read(_shard_spans(train.size, shard, shards)),
        held_out=held_out.read(window_spans(held_out.size, context, eval_bytes)).reshape(
            -1, context + 1
        ),
        text_bytes=text_bytes,
    )


def find_files(source: str) -> tuple[Any, list[TextFile]]:
    """The file system of ``source`` and its files that are not empty, by name; at least one."""
    try:
        fs, files = _stdlib_files() if source == STDLIB else _uri_files(source)
    except SettingsError:
        raise
    except Exception as error:  # fsspec raises whatever the backend's client raises
        raise unreadable(source, error) from error
    if not files:
        raise SettingsError("data", f"expected text at {source!r}, found no file that is not empty")
    return fs, files


def _stdlib_files() -> tuple[Any, list[TextFile]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = _NOT_SOURCE | _GENERATED
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skipped and not f.startswith(".")]
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                size = path.stat().st_size
                relative = path.relative_to(root).as_posix()
                files.append(TextFile(path=str(path), name=relative, size=size))
    if not files:
        raise SettingsError(
            "data", f"expected the standard library's source text in {root}, found no .py file"
        )
    return LocalFileSystem(), _in_order(files)


def _uri_files(uri: str) -> tuple[Any, list[TextFile]]:
    fs, path = url_to_fs(uri, skip_instance_cache=True, use_listings_cache=False)
    path = str(path).rstrip("/")
    if any(character in path for character in "*?["):
        parts = itertools.takewhile(lambda p: not set(p) & set("*?["), path.split("/"))
        root = "/".join(parts)
        infos = {p: info for p, info in fs.glob(path, detail=True).items() if _is_file(info)}
    elif _is_file(info := fs.info(path)):
        root, infos = path.rpartition("/")[0], {path: info}
    else:
        root, infos = path, fs.find(path, detail=True)
    files = []
    for found, info in infos.items():
        name = str(found)[len(root) :].lstrip("/")
        if any(part.startswith(".") for part in PurePosixPath(name).parts):
            continue
        if info.get("size") is None:
            raise SettingsError("data", f"expected a store that tells sizes, found none of {found}")
        files.append(TextFile(path=str(found), name=name, size=int(info["size"])))
    return fs, _in_order(files)


def _is_file(info: dict[str, Any]) -> bool:
    return bool(info["type"] == "file")


def _in_order(files: list[TextFile]) -> list[TextFile]:
    return sorted((file for file in files if file.size), key=lambda file: file.name)


def unreadable(source: str, error: Exception) -> SettingsError:
    if isinstance(error, FileNotFoundError):
        found = "nothing there"
    else:
        found = f"{type(error).__name__}: {error}"
    return SettingsError("data", f"expected text that can be read at {source!r}, found {found}")


def _split(files: Sequence[TextFile]) -> tuple[list[_Extent], list[_Extent]]:
    """Training and held-out extents of the text."""
    total = sum(file.size for file in files)
    held_out = sum(file.size for file in files if file.held_out)
    if HELD_OUT / 4 <= held_out / total <= HELD_OUT * 4:
        whole = [(file.held_out, file.extent(0, file.size)) for file in files]
        return [e for held, e in whole if not held], [e for held, e in whole if held]
    cuts = [(file, file.size - round(file.size * HELD_OUT)) for file in files]
    return (
        [file.extent(0, cut) for file, cut in cuts],
        [file.extent(cut, file.size) for file, cut in cuts if cut < file.size],
    )


def _shard_spans(size: int, shard: int, shards: int) -> list[tuple[int, int]]:
    """Blocks ``shard``, ``shard + shards``, ... of a text; an incomplete last round is left over,
    so that all shards are of one size."""
    block = min(max(size // (shards * _BLOCKS_PER_SHARD), _MIN_BLOCK), _MAX_BLOCK, size // shards)
    deals = size // (block * shards)
    starts = ((deal * shards + shard) * block for deal in range(deals))
    return [(start, start + block) for start in starts]


def window_spans(size: int, context: int, eval_bytes: int) -> list[tuple[int, int]]:
    """Windows of ``context + 1`` bytes, spread evenly; no byte is predicted twice."""
    windows = max(1, min(eval_bytes, size - 1) // context)
    room = size - (context + 1)
    starts = [room * i // max(1, windows - 1) for i in range(windows)]
    return [(start, start + context + 1) for start in starts]


@dataclass(frozen=True, kw_only=True)
class _Request:
    """One read of a file, whole where ``start`` and ``end`` are None, and what is cut from it."""

    path: str
    start: int | None
    end: int | None
    pieces: tuple[_Extent, ...]


class _Text:
    """Extents put end to end and read by spans of positions."""

    def __init__(self, source: str, fs: Any, extents: Sequence[_Extent]) -> None:
        self._source = source
        self._fs = fs
        self._extents = extents
        self._ends = list(itertools.accumulate(extent.length for extent in extents))
        self.size = self._ends[-1] if self._ends else 0

    def _pieces(self, spans: Sequence[tuple[int, int]]) -> Iterator[_Extent]:
        """The file ranges that make up ``spans``, in their order."""
        for start, end in spans:
            at = bisect.bisect_right(self._ends, start)
            while start < end:
                extent = self._extents[at]
                offset = start - (self._ends[at] - extent.length)
                length = min(end, self._ends[at]) - start
                yield _Extent(path=extent.path, start=extent.start + offset, length=length)
                start, at = start + length, at + 1

    def read(self, spans: Sequence[tuple[int, int]]) -> Bytes:
        """The bytes of ``spans``, put end to end."""
        out = np.empty(sum(end - start for start, end in spans), np.uint8)
        at = 0
        for piece, data in self._fetch(self._pieces(spans)):
            if len(data) != piece.length:
                raise SettingsError(
                    "data",
                    f"expected {piece.length:,} bytes at {piece.start:,} of {piece.path}, "
                    f"found {len(data):,}",
                )
            if b"\0" in data:
                raise SettingsError("data", f"expected text, found zero bytes in {piece.path}")
            out[at : at + piece.length] = np.frombuffer(data, np.uint8)
            at += piece.length
        return out

    def _fetch(self, pieces: Iterator[_Extent]) -> Iterator[tuple[_Extent, bytes]]:
        """Each piece with its bytes. The requests of a batch go out together."""
        requests = self._requests(pieces)
        while batch := list(itertools.islice(requests, _REQUESTS_AT_ONCE)):
            try:
                answers = self._fs.cat_ranges(
                    [request.path for request in batch],
                    [request.start for request in batch],
                    [request.end for request in batch],
                    on_error="raise",
                )
            except Exception as error:  # whatever the store's client raises
                raise unreadable(self._source, error) from error
            for request, answer in zip(batch, answers, strict=True):
                for piece in request.pieces:
                    start = piece.start - (request.start or 0)
                    yield piece, bytes(answer[start : start + piece.length])

    def _requests(self, pieces: Iterator[_Extent]) -> Iterator[_Request]:
        sizes = {extent.path: extent.start + extent.length for extent in self._extents}
        for path, group in itertools.groupby(pieces, key=lambda piece: piece.path):
            if sizes[path] <= _WHOLE_FILE:
                yield _Request(path=path, start=None, end=None, pieces=tuple(group))
                continue
            for piece in group:
                end = piece.start + piece.length
                yield _Request(path=path, start=piece.start, end=end, pieces=(piece,))
