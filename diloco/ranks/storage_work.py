"""One rank's part of writing and reading the checkpoints and the state of a replica.

Each rank writes and reads what it holds. The pieces of the ranks (:mod:`diloco.protocol.pieces`)
are together the object that one process would write.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diloco.model.tensor_file import (
    Entry,
    Window,
    header_of,
    packed,
)
from diloco.protocol.blocks import Span
from diloco.protocol.pieces import piece_key
from diloco.protocol.records import StoredObject
from diloco.ranks.collective_ops import Ranks, SharedInner
from diloco.ranks.command_channel import LEADER
from diloco.ranks.jobs import Job
from diloco.ranks.rank_progress import LEADER_AHEAD_S, RankProgress
from diloco.ranks.sliced_layout import Stretch
from diloco.ranks.state_share import (
    Residual,
    SavedShares,
    SharedTensor,
    StateShare,
    copied,
)
from diloco.store.base import Store
from diloco.training.checkpoint import read_vectors
from diloco.training.replica_state import fragment_of, is_residual
from diloco.training.stored_objects import load_windows, put_parts

WEIGHTS, OUTER = "weights", "outer"

Written = list[tuple[int, int, str]]
"""Number, size in bytes and checksums of each piece that one rank has written."""


def go_on() -> None:
    pass


@dataclass(frozen=True)
class Vector:
    """The elements ``span`` of the flat vector: ``held`` has those of this rank, which begin at
    ``first`` of all that it holds."""

    held: Tensor
    span: Span
    first: int = 0


class StorageWork:
    """One rank's part of writing and reading checkpoints and state. On the leader, ``prefix`` are
    the bytes before the vectors of an object, and ``check`` is called before each part."""

    def __init__(
        self,
        progress: RankProgress,
        inner: SharedInner,
        open_store: Callable[[], Store],
        ranks: Ranks,
    ) -> None:
        self.prefix = b""
        self.check: Callable[[], None] = go_on
        self.layout = progress.layout
        self.state = progress.state
        self.progress = progress
        self.inner = inner
        self.own: dict[str, Tensor] = {}
        """Tensors of the caller's objects in the state that was read."""
        self._ranks = ranks
        self._channel = ranks.storage
        self._open_store = open_store
        self._store: Store | None = None
        self._shares: dict[int, StateShare] = {}
        self._copies = 0
        self._has_copied = threading.Condition()

    @property
    def shared_names(self) -> Set[str]:
        """The names of the tensors of the optimizers' state, which all ranks have."""
        return self.inner.own.keys()

    def do(self, job: Job) -> Any:
        """Execute a job; return its result as JSON values."""
        if self._store is None:
            self._store = self._open_store()
        match job["do"]:
            case "put":
                weights, outer = self.state.written(job["snapshot"])
                held = [weights] if job["which"] == WEIGHTS else [*outer.vectors.values()]
                vectors = [Vector(tensor, self.layout.span(None)) for tensor in held]
                return self._put(self._store, job["key"], self.prefix, vectors)
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
            case "put_state":
                share = self._share(job["share"])
                tensors = self._put_share(self._store, f"{job['key']}.safetensors", share)
                key = f"{job['key']}-residuals.safetensors"
                return [tensors, self._put_residuals(self._store, key, share.residuals)]
            case "read_state":
                self.own = self._read_state(self._store, **job["state"])
                return None
        raise AssertionError(job)

    # -- checkpoints -----------------------------------------------------------------------------

    def _put(self, store: Store, key: str, prefix: bytes, vectors: Sequence[Vector]) -> Written:
        """Write this rank's pieces of an object."""
        written = []
        for n, piece in enumerate(self._pieces(vectors)):
            if piece.rank != self._channel.rank:
                continue
            before = prefix if n == 0 else b""
            tensors = [stretch.of(vectors[vector].held) for vector, stretch in piece.stretches]
            size_bytes = len(before) + sum(tensor.nbytes for tensor in tensors)
            make_parts = partial(packed, before, tensors, size_bytes)
            stored = put_parts(store, piece_key(key, n), make_parts, check=self.check)
            written.append((n, stored.size_bytes, stored.checksums))
        return written

    def _pieces(self, vectors: Sequence[Vector]) -> list[Piece]:
        """Return the pieces of an object of vectors. The leader has the first one."""
        pieces = [Piece(rank=LEADER)]
        for number, vector in enumerate(vectors):
            for stretch in self.layout.stretches:
                for part in stretch.within(vector.span):
                    if part.rank != pieces[-1].rank:
                        pieces.append(Piece(rank=part.rank))
                    part = replace(part, at=part.at - vector.first)
                    pieces[-1].stretches.append((number, part))
        return pieces

    # -- state -----------------------------------------------------------------------------------

    def copy(
        self, tensors: Sequence[SharedTensor], own: Mapping[str, Tensor], residuals: Sequence[str]
    ) -> int:
        """Copy this rank's share of the replica state; return its number. All ranks call this
        together, in their training loops."""
        share = copied(tensors, own, self._ranks.channel)
        self.inner.own = {}
        fragments = self.layout.table.fragments
        share.residuals = [
            Residual(
                name=name,
                fragment=fragment_of(name, fragments),
                held=self.progress.take_residual(name),
            )
            for name in residuals
        ]
        with self._has_copied:
            self._copies += 1
            self._shares[self._copies] = share
            self._has_copied.notify_all()
            return self._copies

    def follow_copy(self) -> None:
        """Copy the share of a follower."""
        tensors, residuals = json.loads(self._ranks.channel.text())
        described = [
            SharedTensor(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in tensors
        ]
        self.copy(described, self.inner.own, residuals)

    def _share(self, number: int) -> StateShare:
        """Return a copy, and free older ones, whose job has failed before it took them. The leader
        can be ahead, so that this rank is still copying."""
        with self._has_copied:
            self._has_copied.wait_for(lambda: number in self._shares, timeout=LEADER_AHEAD_S)
            for older in [other for other in self._shares if other < number]:
                del self._shares[older]
            return self._shares.pop(number)

    def _put_share(self, store: Store, key: str, share: StateShare) -> Written:
        size_bytes = share.memory.numel()
        if not size_bytes:
            return []
        n = sum(1 for size in share.sizes[: self._channel.rank] if size)
        stored = put_parts(store, piece_key(key, n), share.parts, check=self.check)
        return [(n, stored.size_bytes, stored.checksums)]

    def _put_residuals(self, store: Store, key: str, residuals: Sequence[Residual]) -> Written:
        if not residuals:
            return []
        layout = self.layout
        spans = [layout.span(residual.fragment) for residual in residuals]
        header = header_of(
            {
                residual.name: torch.empty(span.numel, device="meta")
                for residual, span in zip(residuals, spans, strict=True)
            }
        )
        vectors = [
            Vector(residual.held, span, layout.held_span(residual.fragment).start)
            for residual, span in zip(residuals, spans, strict=True)
        ]
        return self._put(store, key, header, vectors)

    def _read_state(
        self, store: Store, *, tensors: Job, residuals: Job | None, skeleton: Any, own: list[str]
    ) -> dict[str, Tensor]:
        """Read this rank's share of the optimizer state ``skeleton``, its slices of the residuals,
        and on the leader the tensors ``own``; return these."""
        stored, names, found = _stored(**tensors), set(own), dict[str, Tensor]()
        saved = SavedShares(skeleton, stored.size_bytes, self._channel)
        held: dict[str, Tensor] = {}

        def windows(entry: Entry) -> Iterator[Window]:
            if is_residual(entry.name):
                yield from self._residual_windows(entry, held)
            elif entry.name in saved.names:
                yield saved.window(entry)
            elif entry.name in names and self._channel.is_leader:
                found[entry.name] = entry.empty()
                yield Window(0, found[entry.name].reshape(-1))

        load_windows(store, stored, windows)
        if residuals is not None:
            load_windows(
                store, _stored(**residuals), lambda entry: self._residual_windows(entry, held)
            )
        self.progress.held = held
        self.inner.saved = saved if skeleton is not None else None
        return found

    def _residual_windows(self, entry: Entry, held: dict[str, Tensor]) -> Iterator[Window]:
        """Yield this rank's slice of a residual, and add it to ``held``; one of another model is
        left out."""
        layout = self.layout
        if not is_residual(entry.name) or entry.dtype != torch.float32:
            return
        fragment = fragment_of(entry.name, layout.table.fragments)
        if not 0 <= fragment < layout.table.fragments:
            return
        span, own = layout.span(fragment), layout.held_span(fragment)
        if entry.shape != (span.numel,):
            return
        vector = held[entry.name] = torch.empty(own.numel)
        for part, at in layout.held_parts(span):
            into = vector[at - own.start :][: part.numel]
            yield Window(part.start - span.start, into)


def _stored(*, pieces: list[int] | None, **values: Any) -> StoredObject:
    return StoredObject(pieces=tuple(pieces) if pieces else None, **values)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The stretches, each with the number of its vector, that one rank writes as an object."""

    rank: int
    stretches: list[tuple[int, Stretch]] = field(default_factory=list)
