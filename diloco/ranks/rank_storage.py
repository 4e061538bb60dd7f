"""Checkpoints of a replica of several ranks: each rank writes and reads what it holds.

The leader sends the jobs (:mod:`diloco.ranks.jobs`), and writes the headers and the manifest. The
pieces of the ranks (:mod:`diloco.protocol.pieces`) are together the object that one process would
write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diloco.model.outer_optimizer import OuterOptimizer
from diloco.model.outer_rules import COMMITTED_TOTAL
from diloco.model.tensor_file import header_of, in_order, packed
from diloco.protocol.pieces import piece_key
from diloco.protocol.records import CheckpointManifest, StoredObject
from diloco.ranks.command_channel import LEADER, CommandChannel
from diloco.ranks.jobs import Job, JobLeader
from diloco.ranks.rank_progress import RankProgress
from diloco.ranks.sliced_layout import Stretch
from diloco.store.base import Store
from diloco.store.metered import MeteredStore
from diloco.training.checkpoint import Restored, read_vectors, restored
from diloco.training.model_check import check_model
from diloco.training.stored_objects import put_parts

WEIGHTS, OUTER = "weights", "outer"


def _go_on() -> None:
    pass


class StorageWork:
    """One rank's part of writing and reading checkpoints. On the leader, ``prefix`` are the bytes
    before the vectors of an object, and ``check`` is called before each part."""

    def __init__(
        self, progress: RankProgress, open_store: Callable[[], Store], channel: CommandChannel
    ) -> None:
        self.prefix = b""
        self.check: Callable[[], None] = _go_on
        self.layout = progress.layout
        self.state = progress.state
        self._open_store = open_store
        self._channel = channel
        self._store: Store | None = None

    def do(self, job: Job) -> Any:
        """Execute a job; return its result as JSON values."""
        if self._store is None:
            self._store = self._open_store()
        match job["do"]:
            case "put":
                weights, outer = self.state.written(job["snapshot"])
                vectors = [weights] if job["which"] == WEIGHTS else [*outer.vectors.values()]
                return self._put(self._store, job["key"], vectors)
            case "digest":
                weights, _ = self.state.written(job["snapshot"])
                return self.layout.model_digest(weights, self._channel)
            case "load":
                self.state.read = read_vectors(
                    self._store,
                    _stored(**job[WEIGHTS]),
                    _stored(**job[OUTER]) if job[OUTER] else None,
                    self.layout,
                    self.state.outer,
                )
                return self.state.read.committed
        raise AssertionError(job)

    def _put(self, store: Store, key: str, vectors: Sequence[Tensor]) -> list[tuple[int, int, str]]:
        """Write this rank's pieces; return number, size in bytes and checksums of each."""
        written = []
        for n, piece in enumerate(self._pieces(len(vectors))):
            if piece.rank != self._channel.rank:
                continue
            prefix = self.prefix if n == 0 else b""
            tensors = [stretch.of(vectors[vector]) for vector, stretch in piece.stretches]
            size_bytes = len(prefix) + sum(tensor.nbytes for tensor in tensors)
            make_parts = partial(packed, prefix, tensors, size_bytes)
            stored = put_parts(store, piece_key(key, n), make_parts, check=self.check)
            written.append((n, stored.size_bytes, stored.checksums))
        return written

    def _pieces(self, vectors: int) -> list[Piece]:
        """Return the pieces of an object of so many vectors. The leader has the first one."""
        pieces = [Piece(rank=LEADER)]
        for vector in range(vectors):
            for stretch in self.layout.stretches:
                if stretch.rank != pieces[-1].rank:
                    pieces.append(Piece(rank=stretch.rank))
                pieces[-1].stretches.append((vector, stretch))
        return pieces


def _stored(*, pieces: list[int] | None, **values: Any) -> StoredObject:
    return StoredObject(pieces=tuple(pieces) if pieces else None, **values)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The stretches, each with the number of its vector, that one rank writes as an object."""

    rank: int
    stretches: list[tuple[int, Stretch]] = field(default_factory=list)


class RankStorage(JobLeader):
    """The leader's side: the storage of the checkpoints of a replica of several ranks."""

    def __init__(self, work: StorageWork, channel: CommandChannel, metered: MeteredStore) -> None:
        super().__init__(work, channel, metered)
        self._storage = work

    def put_weights(self, key: str, weights: Tensor, *, check: Callable[[], None]) -> StoredObject:
        layout = self._storage.layout
        tensors = layout.split(torch.empty(layout.numel, dtype=weights.dtype, device="meta"))
        return self._put(key, WEIGHTS, header_of(in_order(tensors)), check)

    def put_outer(
        self,
        key: str,
        vectors: Mapping[str, Tensor],
        committed: int,
        *,
        check: Callable[[], None],
    ) -> StoredObject:
        numel, count = self._storage.layout.numel, torch.tensor(committed, dtype=torch.int64)
        tensors = {
            name: torch.empty(numel, dtype=vector.dtype, device="meta")
            for name, vector in vectors.items()
        }
        header = header_of(in_order({**tensors, COMMITTED_TOTAL: count}))
        return self._put(key, OUTER, header + count.numpy().tobytes(), check)

    def _put(self, key: str, which: str, prefix: bytes, check: Callable[[], None]) -> StoredObject:
        with self.lock:
            self._storage.prefix, self._storage.check = prefix, check
            try:
                results = self.run("put", key=key, which=which, snapshot=self._number)
            finally:
                self._storage.prefix, self._storage.check = b"", _go_on
        written = sorted(piece for result in results for piece in result)
        sizes = tuple(size_bytes for _, size_bytes, _ in written)
        return StoredObject(
            key=key,
            size_bytes=sum(sizes),
            checksums="".join(checksums for _, _, checksums in written),
            pieces=sizes if len(sizes) > 1 else None,
        )

    def digest(self, weights: Tensor) -> str:
        digest: str = self.run("digest", snapshot=self._number)[0]
        return digest

    @property
    def _number(self) -> int:
        return self._storage.state.snapshots

    def load(self, manifest: CheckpointManifest, outer: OuterOptimizer) -> Restored:
        check_model(manifest, self._storage.layout)
        stored = {WEIGHTS: asdict(manifest.weights), OUTER: None}
        if manifest.outer is not None:
            stored[OUTER] = asdict(manifest.outer)
        self.run("load", **stored)
        read = self._storage.state.read
        assert read is not None
        return restored(manifest, read)
