"""Text of any source as tokens: this replica's shard and the held-out windows.

Sources are files of text, or rows with a text column (JSON lines, Parquet, CSV, any data set of the
hub), streamed by the ``datasets`` library: nothing is written to a cache, and replicas on one
machine wait for no lock. Every process reads all of the text and tokenizes its own part.

Documents are cut into pieces at white space. A piece is *held out* if the hash of its text says so
(one in twenty), so that a copy of it elsewhere is held out too; the others are dealt out to the
shards like cards. A shard's pieces, put end to end with the end-of-text token after each document
(where the tokenizer has one), are one long row of tokens.

Left out: shuffling (batches pick random windows) and shards bigger than memory. Errors:
:class:`SettingsError` on ``data`` or the field that is wrong, with what was expected and found.
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
from diloco.protocol.workload import STDLIB, HuggingFaceWorkload
from diloco.workloads.text import HELD_OUT, find_files, unreadable, window_spans
from diloco.workloads.tokens import Tokenizer, hub_is_there

Tokens = npt.NDArray[np.int32]

_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_COMPRESSED = frozenset({".gz", ".zst", ".bz2", ".xz"})
_SMALL = 1 << 22
"""Characters of text up to which it is looked at as a whole before it is cut."""
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
    """Whether it is the last of its document."""

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:4], "big") < HELD_OUT * 2**32


def load_tokens(
    workload: HuggingFaceWorkload, tokenizer: Tokenizer, *, shard: int, shards: int
) -> TokenCorpus:
    """Shard ``shard`` of ``shards``, and the same held-out windows for all of them."""
    assert 0 <= shard < shards, (shard, shards)
    enough = workload.eval_tokens * _HELD_OUT_CHARACTERS
    mine: list[_Piece] = []
    held_out: list[_Piece] = []
    dealt = held_characters = 0
    for piece, kept_back in _sorted_out(_documents(workload), shards):
        if kept_back:
            if held_characters < enough:
                held_out.append(piece)
                held_characters += len(piece.text)
        else:
            if dealt % shards == shard:
                mine.append(piece)
            dealt += 1
    train, spare = _tokenize(mine, tokenizer), _tokenize(held_out, tokenizer)
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


def _sorted_out(documents: Iterable[str], shards: int) -> Iterator[tuple[_Piece, bool]]:
    """Every piece, and whether it is held out. A little text is cut smaller, so that there is
    something for everybody."""
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
    """Documents cut after white space into pieces of ``length`` characters or less."""
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
        together = pieces[start : start + _TOKENIZED_TOGETHER]
        encoded = tokenizer.encode([piece.text for piece in together])
        for piece, row in zip(together, encoded, strict=True):
            rows += [row, end] if piece.ends else [row]
    return np.concatenate(rows)


# -- from a source to documents ----------------------------------------------------------------


def _documents(workload: HuggingFaceWorkload) -> Iterator[str]:
    found = _all_documents(workload)
    return itertools.islice(found, workload.documents) if workload.documents else found


def _all_documents(workload: HuggingFaceWorkload) -> Iterator[str]:
    data, form = workload.data, workload.data_format
    if form == "dataset" or (form == "auto" and not _is_files(data)):
        local = Path(data).is_dir()
        if not local and not hub_is_there():
            raise SettingsError(
                "data",
                f"expected files at {data!r}, or the hub to stream the data set of that name from, "
                "found neither (the hub cannot be reached, or HF_HUB_OFFLINE is set)",
            )
        return _rows(workload, path=data, name=workload.data_config or None,
                     split=workload.data_split)  # fmt: skip
    fs, files = find_files(data)
    if form == "auto":
        form = _format([file.path for file in files])
    if form == "text":
        return _texts(data, fs, [file.path for file in files])
    urls = [fs.unstrip_protocol(file.path) for file in files]
    return _rows(workload, path=form, data_files=urls, split="train")


def _is_files(data: str) -> bool:
    """Whether ``data`` cannot be a name on the hub."""
    if data == STDLIB or data.startswith(("/", ".")) or "://" in data:
        return True
    return bool(set(data) & set("*?[")) or Path(data).exists()


def _format(paths: list[str]) -> str:
    """What all of the files are by their names; text where they are not all of one kind."""
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
    except Exception as error:  # the library raises its own, the hub's and the file systems' errors
        raise SettingsError(
            "data", f"expected rows at {workload.data!r}, found {type(error).__name__}: {error}"
        ) from error


def _columns(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} ({type(value).__name__})" for name, value in row.items())
