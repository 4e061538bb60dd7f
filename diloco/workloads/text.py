"""Text as bytes: the training shard of a replica and the held-out windows.

A source is :data:`~diloco.protocol.workload.STDLIB` or any fsspec URI of a file, a folder or a
glob. The text is the concatenation of the files in order of name:

- A hash of its name decides whether a file is *held out* (about one in twenty), so that a file is
  held out in every source. If this would hold out too little or too much, as with a single file,
  the last twentieth of every file is held out instead. No shard contains held-out bytes.
- The rest is cut into blocks that are assigned to the shards in turn, so that shards are disjoint,
  of equal size and similar, for any number of files.

Only the shard and the evaluation windows are read, as uint8; large files are read by ranges.

There is no decompression, no tokenizer and no shuffling (batches use random windows), and a shard
must fit in memory. Errors: :class:`SettingsError` on the field ``data``.
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
"""Generated tables, and one file of 0.75 MB that would be most of the held-out text."""
_MIN_BLOCK, _MAX_BLOCK, _BLOCKS_PER_SHARD = 1 << 12, 1 << 23, 64
_WHOLE_FILE = 1 << 23
"""Files of up to this many bytes are read whole, larger ones by ranges."""
_REQUESTS_AT_ONCE = 32


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """``train``: one shard, (bytes,) uint8. ``held_out``: (windows, context + 1) uint8.

    ``text_bytes`` is the size of the whole text, including all shards and the held-out part.
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
    """A file of the source; ``name`` is its path relative to the source."""

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
    """Load shard ``shard`` of ``shards``, and windows of ``context + 1`` bytes that together
    predict ``eval_bytes`` tokens.

    From the same files, every process gets the same windows, and shards never overlap.
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
    """Return the file system of ``source`` and its non-empty files (at least one), sorted by
    name."""
    try:
        fs, files = _stdlib_files() if source == STDLIB else _uri_files(source)
    except SettingsError:
        raise
    except Exception as error:  # fsspec raises whatever the backend's client raises
        raise unreadable(source, error) from error
    if not files:
        raise SettingsError("data", f"expected text at {source!r}, found no non-empty file")
    return fs, files


def is_files(data: str) -> bool:
    """Return whether ``data`` cannot be a name on the Hub."""
    if data == STDLIB or data.startswith(("/", ".")) or "://" in data:
        return True
    return bool(set(data) & set("*?[")) or Path(data).exists()


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
    for file_path, info in infos.items():
        name = str(file_path)[len(root) :].lstrip("/")
        if any(part.startswith(".") for part in PurePosixPath(name).parts):
            continue
        if info.get("size") is None:
            raise SettingsError("data", f"expected the size of {file_path}, found none")
        files.append(TextFile(path=str(file_path), name=name, size=int(info["size"])))
    return fs, _in_order(files)


def _is_file(info: dict[str, Any]) -> bool:
    return bool(info["type"] == "file")


def _in_order(files: list[TextFile]) -> list[TextFile]:
    return sorted((file for file in files if file.size), key=lambda file: file.name)


def unreadable(source: str, error: Exception) -> SettingsError:
    """Convert an error of the file system into a :class:`SettingsError` on ``data``."""
    if isinstance(error, FileNotFoundError):
        problem = "nothing"
    else:
        problem = f"{type(error).__name__}: {error}"
    return SettingsError("data", f"expected readable text at {source!r}, found {problem}")


def _split(files: Sequence[TextFile]) -> tuple[list[_Extent], list[_Extent]]:
    """Split the text into training and held-out extents."""
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
    """Return blocks ``shard``, ``shard + shards``, ... of a text. Blocks after the last complete
    round of shards are not used, so that all shards have one size."""
    block = min(max(size // (shards * _BLOCKS_PER_SHARD), _MIN_BLOCK), _MAX_BLOCK, size // shards)
    turns = size // (block * shards)
    starts = ((turn * shards + shard) * block for turn in range(turns))
    return [(start, start + block) for start in starts]


def window_spans(size: int, context: int, eval_bytes: int) -> list[tuple[int, int]]:
    """Return evenly spaced windows of ``context + 1`` bytes that predict no byte twice."""
    windows = max(1, min(eval_bytes, size - 1) // context)
    room = size - (context + 1)
    starts = [room * i // max(1, windows - 1) for i in range(windows)]
    return [(start, start + context + 1) for start in starts]


@dataclass(frozen=True, kw_only=True)
class _Request:
    """One read of a file (the whole file if ``start`` and ``end`` are None) and its pieces."""

    path: str
    start: int | None
    end: int | None
    pieces: tuple[_Extent, ...]


class _Text:
    """A concatenation of extents, read by spans of positions."""

    def __init__(self, source: str, fs: Any, extents: Sequence[_Extent]) -> None:
        self._source = source
        self._fs = fs
        self._extents = extents
        self._ends = list(itertools.accumulate(extent.length for extent in extents))
        self.size = self._ends[-1] if self._ends else 0

    def _pieces(self, spans: Sequence[tuple[int, int]]) -> Iterator[_Extent]:
        """Yield the file ranges of ``spans``, in order."""
        for start, end in spans:
            at = bisect.bisect_right(self._ends, start)
            while start < end:
                extent = self._extents[at]
                offset = start - (self._ends[at] - extent.length)
                length = min(end, self._ends[at]) - start
                yield _Extent(path=extent.path, start=extent.start + offset, length=length)
                start, at = start + length, at + 1

    def read(self, spans: Sequence[tuple[int, int]]) -> Bytes:
        """Return the concatenated bytes of ``spans``."""
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
        """Yield each piece with its bytes. The requests of a batch are sent together."""
        requests = self._requests(pieces)
        while batch := list(itertools.islice(requests, _REQUESTS_AT_ONCE)):
            try:
                contents = self._fs.cat_ranges(
                    [request.path for request in batch],
                    [request.start for request in batch],
                    [request.end for request in batch],
                    on_error="raise",
                )
            except Exception as error:  # whatever the store's client raises
                raise unreadable(self._source, error) from error
            for request, content in zip(batch, contents, strict=True):
                for piece in request.pieces:
                    start = piece.start - (request.start or 0)
                    yield piece, bytes(content[start : start + piece.length])

    def _requests(self, pieces: Iterator[_Extent]) -> Iterator[_Request]:
        sizes = {extent.path: extent.start + extent.length for extent in self._extents}
        for path, group in itertools.groupby(pieces, key=lambda piece: piece.path):
            if sizes[path] <= _WHOLE_FILE:
                yield _Request(path=path, start=None, end=None, pieces=tuple(group))
                continue
            for piece in group:
                end = piece.start + piece.length
                yield _Request(path=path, start=piece.start, end=end, pieces=(piece,))
