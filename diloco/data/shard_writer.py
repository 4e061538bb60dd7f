"""Writes token shards: one :class:`PartWriter` per part of the source, with separate shards.

A part is written completely or again from its start, so parts can be written in parallel and in any
order, and the shards are the same. ``parts/<n>.json`` records a written part; the index is made of
all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_hexdigest

from diloco.data.shard_index import SPLITS, BadIndex, Shard
from diloco.store.base import MissingKey, Store

PART_BYTES = 1 << 24
"""Largest record of a part."""


@dataclass(frozen=True, kw_only=True)
class WrittenPart:
    """The shards of one part."""

    train: tuple[Shard, ...]
    held_out: tuple[Shard, ...]

    def to_bytes(self) -> bytes:
        return json.dumps(
            {split: [asdict(s) for s in getattr(self, split)] for split in SPLITS}
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> WrittenPart:
        body = json.loads(data)
        return cls(**{split: tuple(Shard(**row) for row in body[split]) for split in SPLITS})


def part_key(part: int) -> str:
    return f"parts/{part:05d}.json"


def read_part(store: Store, part: int) -> WrittenPart | None:
    """Return the record of a written part; None if there is none or it is damaged, so that the part
    is written again."""
    try:
        return WrittenPart.from_bytes(store.get(part_key(part), limit=PART_BYTES))
    except (MissingKey, ValueError, TypeError, KeyError):
        return None


class PartWriter:
    """The shards of part ``part``, of ``shard_tokens`` tokens each; the last one has fewer."""

    def __init__(self, store: Store, part: int, *, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self._store, self._part = store, part
        self._splits = {
            split: _SplitWriter(store, f"{split}/{part:05d}", dtype, shard_tokens)
            for split in SPLITS
        }

    def add(self, tokens: npt.NDArray[Any], *, split: str, ends: bool) -> None:
        """Add tokens, (n,), to a split; ``ends``: they end a document."""
        self._splits[split].add(tokens, ends=ends)

    def close(self) -> WrittenPart:
        """Write the last shards and the record of the part."""
        shards = {split: tuple(writer.close()) for split, writer in self._splits.items()}
        written = WrittenPart(train=shards["train"], held_out=shards["held_out"])
        self._store.put(part_key(self._part), written.to_bytes())
        return written


class _SplitWriter:
    def __init__(self, store: Store, prefix: str, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self._store, self._prefix = store, prefix
        self._buffer = np.empty(shard_tokens, dtype)
        self._count = 0
        self._ends: list[int] = []
        self._shards: list[Shard] = []

    def add(self, tokens: npt.NDArray[Any], *, ends: bool) -> None:
        start = 0
        while start < len(tokens):
            taken = min(len(tokens) - start, len(self._buffer) - self._count)
            self._buffer[self._count : self._count + taken] = tokens[start : start + taken]
            self._count += taken
            start += taken
            if ends and start == len(tokens):
                self._ends.append(self._count)
            if self._count == len(self._buffer):
                self._write()

    def _write(self) -> None:
        if not self._count:
            return
        data = self._buffer[: self._count].tobytes() + np.array(self._ends, "<u4").tobytes()
        name = f"{self._prefix}-{len(self._shards):03d}.tokens"
        self._store.put(name, data)
        self._shards.append(
            Shard(
                name=name,
                tokens=self._count,
                documents=len(self._ends),
                checksum=xxh3_128_hexdigest(data),
            )
        )
        self._count, self._ends = 0, []

    def close(self) -> list[Shard]:
        self._write()
        return self._shards


def shards_of(parts: Iterable[WrittenPart | None], split: str) -> tuple[Shard, ...]:
    """Return the shards of all parts. Raises :class:`BadIndex` for a missing part."""
    shards: list[Shard] = []
    for number, part in enumerate(parts):
        if part is None:
            raise BadIndex(f"expected {part_key(number)}, found none or a damaged one: run again")
        shards += getattr(part, split)
    return tuple(shards)
