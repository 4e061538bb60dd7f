"""Tokenized text: the training shard of a replica and the held-out windows.

A source is a set of text files, or rows with a text column (JSON lines, Parquet, CSV, any data set
on the Hub) that the ``datasets`` library streams, without a cache and without locks between the
replicas on one machine. Every process reads the whole text and tokenizes its own part.

Documents are cut at white space into pieces. A hash of its text decides whether a piece is *held
out* (one in twenty), so that duplicates of it are held out too. The other pieces are assigned to
the shards in turn. A shard is the concatenation of its pieces, with the end-of-text token after
each document if the tokenizer has one.

There is no shuffling (batches use random windows), and a shard must fit in memory. Errors:
:class:`SettingsError` on ``data`` or on the invalid field.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import load_dataset

from diloco.protocol.settings import SettingsError
from diloco.protocol.workload import HuggingFaceWorkload
from diloco.workloads.text import HELD_OUT, find_files, is_files, unreadable, window_spans
from diloco.workloads.tokens import Tokenizer, hub_is_there

Tokens = npt.NDArray[np.int32]

_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_COMPRESSED = frozenset({".gz", ".zst", ".bz2", ".xz"})
_SMALL = 1 << 22
"""Texts of up to this many characters are read completely before they are cut."""
_PIECE, _MIN_PIECE, _PIECES_PER_SHARD = 8192, 256, 64
_TOKENIZED_TOGETHER = 256
_HELD_OUT_CHARACTERS = 16
"""Held-out characters kept for each token that an evaluation reads."""


@dataclass(frozen=True, kw_only=True)
class TokenCorpus:
    """``train``: one shard, (tokens,) int32. ``held_out``: (windows, context + 1) int32."""

    train: Tokens
    held_out: Tokens


@dataclass(frozen=True)
class _Piece:
    text: str
    ends: bool
    """Whether this is the last piece of its document."""

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:4], "big") < HELD_OUT * 2**32


def load_tokens(
    workload: HuggingFaceWorkload, tokenizer: Tokenizer, *, shard: int, shards: int
) -> TokenCorpus:
    """Load shard ``shard`` of ``shards``, and the held-out windows, which all shards share."""
    assert 0 <= shard < shards, (shard, shards)
    enough = workload.eval_tokens * _HELD_OUT_CHARACTERS
    own: list[_Piece] = []
    held_out: list[_Piece] = []
    assigned = held_characters = 0
    for piece, is_held_out in _classified_pieces(_documents(workload), shards):
        if is_held_out:
            if held_characters < enough:
                held_out.append(piece)
                held_characters += len(piece.text)
        else:
            if assigned % shards == shard:
                own.append(piece)
            assigned += 1
    train, spare = _tokenize(own, tokenizer), _tokenize(held_out, tokenizer)
    window = workload.context + 1
    if len(train) < window or len(spare) < window:
        raise SettingsError(
            "data",
            f"expected at least {window:,} tokens in each of {shards} shards and held out, found "
            f"{len(train):,} in shard {shard} and {len(spare):,} held out at {workload.data!r}",
        )
    spans = window_spans(len(spare), workload.context, workload.eval_tokens)
    return TokenCorpus(train=train, held_out=np.stack([spare[a:b] for a, b in spans]))


# -- from documents to tokens ------------------------------------------------------------------


def _classified_pieces(documents: Iterable[str], shards: int) -> Iterator[tuple[_Piece, bool]]:
    """Yield every piece and whether it is held out. Small texts are cut into smaller pieces, so
    that each shard gets some."""
    rest = iter(documents)
    first: list[str] = []
    size = 0
    for document in rest:
        first.append(document)
        size += len(document)
        if size > _SMALL:
            for piece in _pieces(itertools.chain(first, rest), _PIECE):
                yield piece, piece.held_out
            return
    length = min(_PIECE, max(_MIN_PIECE, size // (shards * _PIECES_PER_SHARD)))
    pieces = list(_pieces(first, length))
    hashed = [piece.held_out for piece in pieces]
    if not any(hashed):
        every = round(1 / HELD_OUT)
        hashed = [index % every == min(every, len(pieces)) - 1 for index in range(len(pieces))]
    yield from zip(pieces, hashed, strict=True)


def _pieces(documents: Iterable[str], length: int) -> Iterator[_Piece]:
    """Cut documents after white space into pieces of at most ``length`` characters."""
    for document in documents:
        start = 0
        while len(document) - start > length:
            window = document[start : start + length]
            cut = max(window.rfind(" "), window.rfind("\n")) + 1
            end = start + (cut if cut > length // 2 else length)
            yield _Piece(document[start:end], ends=False)
            start = end
        if document[start:]:
            yield _Piece(document[start:], ends=True)


def _tokenize(pieces: list[_Piece], tokenizer: Tokenizer) -> Tokens:
    rows: list[Tokens] = [np.empty(0, np.int32)]
    end = np.array([] if tokenizer.end is None else [tokenizer.end], np.int32)
    for start in range(0, len(pieces), _TOKENIZED_TOGETHER):
        batch = pieces[start : start + _TOKENIZED_TOGETHER]
        encoded = tokenizer.encode([piece.text for piece in batch])
        for piece, row in zip(batch, encoded, strict=True):
            rows += [row, end] if piece.ends else [row]
    return np.concatenate(rows)


# -- from a source to documents ----------------------------------------------------------------


def _documents(workload: HuggingFaceWorkload) -> Iterator[str]:
    documents = _all_documents(workload)
    return itertools.islice(documents, workload.documents) if workload.documents else documents


def _all_documents(workload: HuggingFaceWorkload) -> Iterator[str]:
    data, form = workload.data, workload.data_format
    if form == "dataset" or (form == "auto" and not is_files(data)):
        local = Path(data).is_dir()
        if not local and not hub_is_there():
            raise SettingsError(
                "data",
                f"expected files at {data!r} or a data set of that name on the Hub, found neither "
                "(the Hub cannot be reached, or HF_HUB_OFFLINE is set)",
            )
        name = workload.data_config or None
        return _rows(workload, path=data, name=name, split=workload.data_split)
    fs, files = find_files(data)
    if form == "auto":
        form = _format([file.path for file in files])
    if form == "text":
        return _texts(data, fs, [file.path for file in files])
    urls = [fs.unstrip_protocol(file.path) for file in files]
    return _rows(workload, path=form, data_files=urls, split="train")


def _format(paths: list[str]) -> str:
    """Derive the format from the file names; text if they differ."""
    kinds = set()
    for path in paths:
        suffixes = [suffix for suffix in PurePosixPath(path).suffixes if suffix not in _COMPRESSED]
        kinds.add(_FORMATS.get(suffixes[-1] if suffixes else "", "text"))
    return kinds.pop() if len(kinds) == 1 else "text"


def _texts(source: str, fs: Any, paths: list[str]) -> Iterator[str]:
    for path in paths:
        try:
            data = fs.cat_file(path)
        except Exception as error:  # whatever the store's client raises
            raise unreadable(source, error) from error
        if b"\0" in data:
            raise SettingsError("data", f"expected text, found zero bytes in {path}")
        yield data.decode(errors="replace")


def _rows(workload: HuggingFaceWorkload, **source: Any) -> Iterator[str]:
    column = workload.text_column
    try:
        for row in load_dataset(**source, streaming=True):
            text = row.get(column)
            if not isinstance(text, str):
                raise SettingsError(
                    "text_column", f"expected text in {column!r}, found {_columns(row)}"
                )
            yield text
    except SettingsError:
        raise
    except Exception as error:  # errors of the library, the Hub or the file system
        raise SettingsError(
            "data", f"expected rows at {workload.data!r}, found {type(error).__name__}: {error}"
        ) from error


def _columns(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} ({type(value).__name__})" for name, value in row.items())
