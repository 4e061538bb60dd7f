"""The index of a set of token shards: ``index.json`` beside the shards. No torch.

::

    index.json                    format, tokenizer, and of every shard: name, counts, checksum
    train/00000-000.tokens        tokens, little-endian, then the ends of the documents (uint32)
    held_out/00000-000.tokens     text that is never trained on

A shard has ``tokens * itemsize + 4 * documents`` bytes. It is read whole and checked against the
size and the xxh3 checksum in the index. Any writer of the bucket can replace the index, so it is
bounded and parsed strictly: :class:`BadIndex` names the field, the expected and the found value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.protocol.parsing import parse_json
from diloco.store.base import MissingKey, ObjectTooLarge, Store

INDEX = "index.json"
VERSION = 1
KIND = "token-shards"
INDEX_BYTES = 1 << 26
"""Largest index: 64 MiB, about 700,000 shards."""
CONTAINERS = 10_000
"""Objects and lists of an index, brackets in its texts included: it has eleven."""
SHARD_BYTES = 1 << 28
"""Largest shard: 256 MiB. The reader holds several in memory."""
SHARDS = 1_000_000
DTYPES = ("uint8", "uint16", "uint32")
SPLITS = ("train", "held_out")
BYTES = "bytes"
"""Tokenizer: every byte is a token."""

_NAME = re.compile(r"(?:train|held_out)/[0-9]{5,7}-[0-9]{3,6}\.tokens")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_TEXT = 1000


class BadIndex(ValueError):
    """The index, or a shard, is not what it has to be; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One shard. ``checksum`` is the xxh3-128 of its bytes in hexadecimal."""

    name: str
    tokens: int
    documents: int
    checksum: str

    def size_bytes(self, dtype: np.dtype[Any]) -> int:
        return self.tokens * dtype.itemsize + 4 * self.documents


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """All shards of a data set and how their tokens were made.

    ``tokenizer_digest`` identifies the tokenizer's rules; ``end`` is the token after each document,
    None if the tokenizer has none.
    """

    tokenizer: str
    tokenizer_digest: str
    vocabulary: int
    end: int | None
    train: tuple[Shard, ...]
    held_out: tuple[Shard, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        return dtype_of(self.vocabulary)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.train)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.train)

    @property
    def digest(self) -> str:
        """Identifies the tokens and their order."""
        from xxhash import xxh3_128_hexdigest

        rows = [f"{s.name} {s.tokens} {s.documents} {s.checksum}" for s in self.train]
        return str(xxh3_128_hexdigest("\n".join(rows).encode()))

    def to_bytes(self) -> bytes:
        body: dict[str, Any] = {
            "v": VERSION,
            "kind": KIND,
            "tokenizer": self.tokenizer,
            "tokenizer_digest": self.tokenizer_digest,
            "vocabulary": self.vocabulary,
            "dtype": self.dtype.name,
            "end": self.end,
        }
        for split in SPLITS:
            shards: tuple[Shard, ...] = getattr(self, split)
            body[split] = {
                "name": [shard.name for shard in shards],
                "tokens": [shard.tokens for shard in shards],
                "documents": [shard.documents for shard in shards],
                "checksum": [shard.checksum for shard in shards],
            }
        return json.dumps(body, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> ShardIndex:
        """Parse an index. Raises :class:`BadIndex`."""
        try:
            body = parse_json(data, containers=CONTAINERS)
        except ValueError as error:
            raise BadIndex(f"{INDEX}: expected JSON, found {error}") from None
        if not isinstance(body, dict) or body.get("kind") != KIND:
            raise BadIndex(
                f"{INDEX}: expected an index of token shards, written by python -m diloco.tokenize"
            )
        if body.get("v") != VERSION:
            raise BadIndex(f"{INDEX}: expected version {VERSION}, found {body.get('v')!r}")
        vocabulary = _whole(body, "vocabulary", 1, 2**32)
        if body.get("dtype") != dtype_of(vocabulary).name:
            expected, found = dtype_of(vocabulary).name, body.get("dtype")
            raise BadIndex(
                f"{INDEX}: dtype: expected {expected} for {vocabulary} tokens, found {found!r}"
            )
        end = None if body.get("end") is None else _whole(body, "end", 0, vocabulary - 1)
        splits = {split: _shards(body, split, dtype_of(vocabulary)) for split in SPLITS}
        names = [shard.name for shards in splits.values() for shard in shards]
        if len(set(names)) != len(names):
            raise BadIndex(f"{INDEX}: expected each shard once, found a name twice")
        return cls(
            tokenizer=_text(body, "tokenizer"),
            tokenizer_digest=_text(body, "tokenizer_digest"),
            vocabulary=vocabulary,
            end=end,
            train=splits["train"],
            held_out=splits["held_out"],
        )


def dtype_of(vocabulary: int) -> np.dtype[Any]:
    """Return the smallest dtype for the tokens of a vocabulary, little-endian."""
    for name in DTYPES:
        if vocabulary - 1 <= np.iinfo(name).max:
            return np.dtype(name).newbyteorder("<")
    raise BadIndex(f"vocabulary: expected at most {2**32} tokens, found {vocabulary}")


def read_index(store: Store) -> ShardIndex:
    """Read ``index.json``. Raises :class:`BadIndex`, or a :class:`~diloco.store.base.StoreError`
    if the store is unavailable or denies access."""
    try:
        return ShardIndex.from_bytes(store.get(INDEX, limit=INDEX_BYTES))
    except MissingKey:
        raise BadIndex(
            f"expected {INDEX} at {store.uri}, found none. Write token shards with "
            "python -m diloco.tokenize"
        ) from None
    except ObjectTooLarge as error:
        raise BadIndex(str(error)) from None


def tokens_of(shard: Shard, data: bytes, index: ShardIndex) -> npt.NDArray[Any]:
    """Check the bytes of a shard and return its tokens, (tokens,) of the index's dtype. Raises
    :class:`BadIndex`."""
    from xxhash import xxh3_128_hexdigest

    expected = shard.size_bytes(index.dtype)
    if len(data) != expected:
        raise BadIndex(f"shard {shard.name}: expected {expected:,} bytes, found {len(data):,}")
    found = xxh3_128_hexdigest(data)
    if found != shard.checksum:
        raise BadIndex(f"shard {shard.name}: expected checksum {shard.checksum}, found {found}")
    tokens = np.frombuffer(data, index.dtype, count=shard.tokens)
    if index.vocabulary < 2 ** (8 * index.dtype.itemsize) and len(tokens):
        highest = int(tokens.max())
        if highest >= index.vocabulary:
            raise BadIndex(
                f"shard {shard.name}: expected tokens below {index.vocabulary:,}, found {highest:,}"
            )
    return tokens


# -- parsing ---------------------------------------------------------------------------------------


def _whole(body: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        found = repr(value)[:80]
        raise BadIndex(f"{INDEX}: {name}: expected {least} to {most}, found {found}")
    return value


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or len(value) > _TEXT:
        raise BadIndex(f"{INDEX}: {name}: expected a short text, found {repr(value)[:80]}")
    return value


def _shards(body: Mapping[str, Any], split: str, dtype: np.dtype[Any]) -> tuple[Shard, ...]:
    columns = body.get(split)
    if not isinstance(columns, dict):
        raise BadIndex(f"{INDEX}: {split}: expected columns, found {repr(columns)[:80]}")
    lists = [columns.get(name) for name in ("name", "tokens", "documents", "checksum")]
    if not all(isinstance(column, list) and len(column) <= SHARDS for column in lists):
        raise BadIndex(f"{INDEX}: {split}: expected four lists of at most {SHARDS:,} entries")
    names, tokens, documents, checksums = (column or [] for column in lists)
    if not len(names) == len(tokens) == len(documents) == len(checksums):
        raise BadIndex(f"{INDEX}: {split}: expected lists of one length")
    return tuple(
        _shard(split, number, row, dtype)
        for number, row in enumerate(zip(names, tokens, documents, checksums, strict=True))
    )


def _shard(split: str, number: int, row: tuple[Any, ...], dtype: np.dtype[Any]) -> Shard:
    name, tokens, documents, checksum = row
    where = f"{INDEX}: {split}: shard {number}"
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not name.startswith(f"{split}/"):
        raise BadIndex(
            f"{where}: expected a name such as {split}/00000-000.tokens, found {str(name)[:80]!r}"
        )
    for what, value, least in (("tokens", tokens, 1), ("documents", documents, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadIndex(f"{where}: {what}: expected {least} or more, found {repr(value)[:80]}")
    if not isinstance(checksum, str) or not _DIGEST.fullmatch(checksum):
        raise BadIndex(f"{where}: expected a checksum of 32 hex digits, found {checksum!r:.80}")
    shard = Shard(name=name, tokens=tokens, documents=documents, checksum=checksum)
    if shard.size_bytes(dtype) > SHARD_BYTES:
        raise BadIndex(f"{where}: expected at most {SHARD_BYTES:,} bytes, found {tokens:,} tokens")
    return shard
