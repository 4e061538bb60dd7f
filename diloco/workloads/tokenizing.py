"""From text to token shards, one part of the source at a time.

The source is divided into *parts*: groups of small files, ranges of large text and JSONL files,
Parquet files, or the shards of a data set on the Hub. A part is tokenized on its own, so that
parts can run in parallel processes and a command that was interrupted repeats only unfinished ones.
A part needs memory for :data:`PART_TEXT_BYTES` of text and one shard of each split.

Long documents are cut at white space into pieces. A hash of its text decides whether a piece is
*held out*, so that duplicates of it are held out too, whatever part they are in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from diloco.data.shard_index import BYTES, dtype_of
from diloco.data.shard_writer import PartWriter, WrittenPart
from diloco.errors import install_extra
from diloco.protocol.settings import SettingsError
from diloco.protocol.workload import VOCABULARY
from diloco.store.base import Store
from diloco.workloads.text import TextFile, find_files, is_files, unreadable

PART_TEXT_BYTES = 1 << 24
"""Text of one part: 16 MiB."""
PIECE = 8192
"""Characters of a piece of a document."""
_LINE_BYTES = 1 << 24
"""Longest line of a JSONL file, and longest search for the end of a line in a text."""
_ENCODED_TOGETHER = 256
TEXT, JSONL, PARQUET, ROWS = "text", "jsonl", "parquet", "dataset"
FORMATS = ("auto", TEXT, JSONL, PARQUET, ROWS)
_SUFFIXES = {".jsonl": JSONL, ".json": JSONL, ".ndjson": JSONL, ".parquet": PARQUET}
_COMPRESSED = frozenset({".gz", ".zst", ".bz2", ".xz"})


@dataclass(frozen=True, kw_only=True)
class Source:
    """Text to tokenize. ``data`` is ``stdlib``, an fsspec URI of files, or a data set of the Hub;
    ``column`` has the text of its rows."""

    data: str
    format: str = "auto"
    column: str = "text"
    config: str = ""
    split: str = "train"


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Bytes ``start`` to ``end`` of a file, moved to the ends of lines."""

    path: str
    start: int
    end: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the source: files or ranges, or shard ``shard`` of a data set's ``shards``."""

    kind: str
    extents: tuple[Extent, ...] = ()
    shard: int = 0
    shards: int = 0


class Encoder(Protocol):
    """A tokenizer: ``digest`` identifies its rules, ``end`` is its end-of-text token."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def end(self) -> int | None: ...

    @property
    def digest(self) -> str: ...

    def encode(self, texts: Sequence[str]) -> Sequence[npt.NDArray[Any]]: ...


class ByteEncoder:
    """Every byte is a token; no end-of-text token."""

    vocabulary = VOCABULARY
    end: int | None = None
    digest = BYTES

    def encode(self, texts: Sequence[str]) -> Sequence[npt.NDArray[Any]]:
        return [np.frombuffer(text.encode(errors="replace"), np.uint8) for text in texts]


class TransformersEncoder:
    """A tokenizer of the Transformers library."""

    def __init__(self, name: str) -> None:
        try:
            from diloco.workloads.tokens import load_tokenizer
        except ModuleNotFoundError as error:
            raise SettingsError(
                "tokenizer",
                f"expected {error.name} for the tokenizer {name!r}, found none; "
                f"{install_extra('transformers')}",
            ) from None
        self._tokenizer = load_tokenizer(name)
        self.vocabulary = self._tokenizer.size
        self.end = self._tokenizer.end

    @cached_property
    def digest(self) -> str:
        return self._tokenizer.digest

    def encode(self, texts: Sequence[str]) -> Sequence[npt.NDArray[Any]]:
        return self._tokenizer.encode(texts)


def load_encoder(name: str) -> Encoder:
    """Load the tokenizer ``name``: :data:`BYTES`, a directory or a name on the Hub. Raises
    :class:`SettingsError` on ``tokenizer``."""
    return ByteEncoder() if name == BYTES else TransformersEncoder(name)


# -- parts ---------------------------------------------------------------------------------------


def find_parts(source: Source) -> list[Part]:
    """Divide a source into parts, at least one. Raises :class:`SettingsError` on ``data``."""
    if source.format == ROWS or (source.format == "auto" and not is_files(source.data)):
        shards = _rows(source).num_shards
        return [Part(kind=ROWS, shard=shard, shards=shards) for shard in range(shards)]
    _, files = find_files(source.data)
    parts: list[Part] = []
    group: list[Extent] = []
    size = 0
    kind = ""
    for file in files:
        own = source.format if source.format != "auto" else _format(file.name)
        extents = _extents(file, own)
        if len(extents) > 1 or own == PARQUET:
            parts += [Part(kind=own, extents=(extent,)) for extent in extents]
            continue
        if group and (own != kind or size + file.size > PART_TEXT_BYTES):
            parts.append(Part(kind=kind, extents=tuple(group)))
            group, size = [], 0
        kind = own
        group += extents
        size += file.size
    return parts + ([Part(kind=kind, extents=tuple(group))] if group else [])


def _format(name: str) -> str:
    suffixes = [s for s in PurePosixPath(name).suffixes if s not in _COMPRESSED]
    return _SUFFIXES.get(suffixes[-1] if suffixes else "", TEXT)


def _extents(file: TextFile, kind: str) -> list[Extent]:
    """Divide a file into ranges; compressed and Parquet files are read whole."""
    whole = kind == PARQUET or PurePosixPath(file.name).suffix in _COMPRESSED
    step = file.size if whole else PART_TEXT_BYTES
    return [
        Extent(path=file.path, start=start, end=min(start + step, file.size), size=file.size)
        for start in range(0, file.size, step)
    ]


# -- documents -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A piece of a document; ``ends``: it is the last one."""

    text: str
    ends: bool

    def is_held_out(self, share: float) -> bool:
        digest = hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:4], "big") < share * 2**32


def tokenize_part(
    source: Source,
    part: Part,
    number: int,
    encoder: Encoder,
    store: Store,
    *,
    shard_tokens: int,
    held_out: float,
) -> WrittenPart:
    """Write the shards of one part. Raises :class:`SettingsError` on ``data`` for text that cannot
    be read."""
    dtype = dtype_of(encoder.vocabulary)
    writer = PartWriter(store, number, dtype=dtype, shard_tokens=shard_tokens)
    end = np.array([] if encoder.end is None else [encoder.end], dtype)
    pieces = _pieces(_documents(source, part))
    while batch := _take(pieces, _ENCODED_TOGETHER):
        rows = encoder.encode([piece.text for piece in batch])
        for piece, row in zip(batch, rows, strict=True):
            split = "held_out" if piece.is_held_out(held_out) else "train"
            tokens = np.concatenate([row.astype(dtype), end]) if piece.ends else row
            writer.add(tokens, split=split, ends=piece.ends)
    return writer.close()


def _take(pieces: Iterator[Piece], count: int) -> list[Piece]:
    return [piece for _, piece in zip(range(count), pieces, strict=False)]


def _pieces(documents: Iterator[tuple[str, bool]]) -> Iterator[Piece]:
    """Cut documents after white space into pieces of at most :data:`PIECE` characters."""
    for document, ends in documents:
        start = 0
        while len(document) - start > PIECE:
            window = document[start : start + PIECE]
            cut = max(window.rfind(" "), window.rfind("\n")) + 1
            stop = start + (cut if cut > PIECE // 2 else PIECE)
            yield Piece(document[start:stop], ends=False)
            start = stop
        if document[start:]:
            yield Piece(document[start:], ends=ends)


def _documents(source: Source, part: Part) -> Iterator[tuple[str, bool]]:
    """Yield the documents of a part, and whether each ends here."""
    if part.kind == ROWS:
        rows = _rows(source).shard(num_shards=part.shards, index=part.shard)
        yield from ((_column(row, source.column), True) for row in rows)
        return
    fs, _ = find_files(source.data)
    for extent in part.extents:
        try:
            yield from _of_file(fs, extent, part.kind, source.column)
        except SettingsError:
            raise
        except Exception as error:  # whatever the store's client or the parser raises
            raise unreadable(extent.path, error) from error


def _of_file(fs: Any, extent: Extent, kind: str, column: str) -> Iterator[tuple[str, bool]]:
    if kind == PARQUET:
        yield from ((text, True) for text in _parquet(fs, extent.path, column))
        return
    data = _lines(fs, extent)
    if b"\0" in data:
        raise SettingsError("data", f"expected text, found zero bytes in {extent.path}")
    if kind == TEXT:
        yield data.decode(errors="replace"), extent.end == extent.size
        return
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            where = f"{extent.path}, line {number} after byte {extent.start:,}"
            yield _json_row(line, column, where), True


def _lines(fs: Any, extent: Extent) -> bytes:
    """Return the lines that begin in an extent."""
    if PurePosixPath(extent.path).suffix in _COMPRESSED:
        with fs.open(extent.path, "rb", compression="infer") as file:
            return bytes(file.read())
    if extent.start == 0 and extent.end == extent.size:
        return bytes(fs.cat_file(extent.path))
    start = extent.start
    before = fs.cat_file(extent.path, start=start - 1, end=start) if start else b"\n"
    data = fs.cat_file(extent.path, start=start, end=extent.end)
    if before != b"\n":  # the line belongs to the extent before
        data = data[data.find(b"\n") + 1 :] if b"\n" in data else b""
    at, limit = extent.end, min(extent.size, extent.end + _LINE_BYTES)
    while data and not data.endswith(b"\n") and at < limit:
        more = fs.cat_file(extent.path, start=at, end=min(limit, at + (1 << 16)))
        cut = more.find(b"\n") + 1
        data += more[:cut] if cut else more
        at += len(more)
    return bytes(data)


def _json_row(line: bytes, column: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SettingsError("data", f"expected a JSON object in {where}, found {error}") from None
    if not isinstance(row, dict):
        raise SettingsError("data", f"expected a JSON object in {where}, found another value")
    return _column(row, column)


def _column(row: dict[str, Any], column: str) -> str:
    text = row.get(column)
    if not isinstance(text, str):
        found = ", ".join(f"{name} ({type(value).__name__})" for name, value in row.items())
        raise SettingsError("text_column", f"expected text in {column!r}, found {found[:300]}")
    return text


def _parquet(fs: Any, path: str, column: str) -> Iterator[str]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise SettingsError(
            "data",
            f"expected {error.name} for Parquet files, found none; {install_extra('parquet')}",
        ) from None
    with fs.open(path, "rb") as file:
        table = parquet.ParquetFile(file)
        if column not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            raise SettingsError("text_column", f"expected text in {column!r}, found {names[:300]}")
        for batch in table.iter_batches(batch_size=1024, columns=[column]):
            for text in batch.column(0).to_pylist():
                yield _column({column: text}, column)


def _rows(source: Source) -> Any:
    """Return a data set of the Hub, streamed. Raises :class:`SettingsError` on ``data``."""
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise SettingsError(
            "data",
            f"expected {error.name} for data sets of the Hub, found none; "
            f"{install_extra('transformers')}",
        ) from None
    try:
        return load_dataset(source.data, source.config or None, split=source.split, streaming=True)
    except Exception as error:  # errors of the library, the Hub or the file system
        raise SettingsError(
            "data", f"expected rows at {source.data!r}, found {type(error).__name__}: {error}"
        ) from error
