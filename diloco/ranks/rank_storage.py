"""Checkpoints and replica state of several ranks: each rank writes and reads what it holds.

The leader sends the jobs (:mod:`diloco.ranks.jobs`), and writes the headers and the manifest. The
pieces of the ranks (:mod:`diloco.protocol.pieces`) are together the object that one process would
write.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diloco.model.inner_state import OPTIMIZER
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.model.outer_rules import COMMITTED_TOTAL
from diloco.model.tensor_file import (
    Entry,
    Window,
    check_storable,
    header_of,
    in_order,
    packed,
)
from diloco.protocol.blocks import Span
from diloco.protocol.pieces import piece_key
from diloco.protocol.records import CheckpointManifest, ReplicaStateManifest, StoredObject
from diloco.ranks.collective_ops import BY_NAME, Operation, Ranks, SharedInner
from diloco.ranks.command_channel import LEADER, StepMessage
from diloco.ranks.jobs import Job, JobLeader
from diloco.ranks.rank_progress import LEADER_AHEAD_S, RankProgress
from diloco.ranks.sliced_layout import Stretch
from diloco.ranks.state_share import (
    Residual,
    SavedShares,
    SharedTensor,
    StateShare,
    copied,
    tensor_names,
)
from diloco.store.base import Store
from diloco.store.metered import MeteredStore
from diloco.training.checkpoint import Restored, read_vectors, restored
from diloco.training.model_check import check_model
from diloco.training.replica_state import ReplicaState, StateWriter, fragment_of, is_residual
from diloco.training.stored_objects import load_windows, put_parts

WEIGHTS, OUTER = "weights", "outer"

Written = list[tuple[int, int, str]]
"""Number, size in bytes and checksums of each piece that one rank has written."""


def _go_on() -> None:
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
        self.check: Callable[[], None] = _go_on
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
        """Return a copy. The leader can be ahead, so that this rank is still copying."""
        with self._has_copied:
            self._has_copied.wait_for(lambda: number in self._shares, timeout=LEADER_AHEAD_S)
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


class RankStorage(JobLeader):
    """The leader's side: the storage of a replica of several ranks
    (:class:`~diloco.training.context.ReplicaStorage`)."""

    def __init__(self, work: StorageWork, ranks: Ranks, metered: MeteredStore) -> None:
        super().__init__(work, ranks.storage, metered)
        self._storage = work
        self._ranks = ranks

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
        results = self._run_checked(
            check, prefix, "put", key=key, which=which, snapshot=self._number
        )
        stored = _joined(key, results)
        assert stored is not None
        return stored

    def _run_checked(
        self, check: Callable[[], None], prefix: bytes, do: str, **arguments: Any
    ) -> list[Any]:
        """Run a job that writes."""
        with self.lock:
            self._storage.prefix, self._storage.check = prefix, check
            try:
                return self.run(do, **arguments)
            finally:
                self._storage.prefix, self._storage.check = b"", _go_on

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

    # -- state -----------------------------------------------------------------------------------

    def state_writer(self, state: ReplicaState) -> StateWriter:
        return RankStateWriter(state, self)

    def copy_state(self, tensors: Mapping[str, Tensor], residuals: Sequence[str]) -> int:
        """Copy the replica state on all ranks; return the number of the copy."""
        described = [
            SharedTensor(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                is_leaders=name not in self._storage.shared_names,
            )
            for name, tensor in in_order(tensors).items()
        ]
        self._ranks.all_reduce(StepMessage(operation=Operation.COPY))
        self._ranks.channel.text(json.dumps([[asdict(each) for each in described], residuals]))
        return self._storage.copy(described, tensors, residuals)

    def put_state(
        self, copy: int, key: str, check: Callable[[], None]
    ) -> tuple[StoredObject, StoredObject | None]:
        """Write a copy; return the objects of its tensors and of its residuals."""
        results = self._run_checked(check, b"", "put_state", share=copy, key=key)
        tensors = _joined(f"{key}.safetensors", [tensors for tensors, _ in results])
        residuals = _joined(f"{key}-residuals.safetensors", [written for _, written in results])
        assert tensors is not None
        return tensors, residuals

    def read_state(self, manifest: ReplicaStateManifest) -> dict[str, Tensor]:
        """Read a saved state on all ranks. The optimizers of a replica of one process are stored in
        another form, which is not read."""
        parts = _parts_of(manifest.tree)
        skeleton = parts.pop(BY_NAME, None)
        others = {name for tree in parts.values() for name in tensor_names(tree)}
        own = {
            name
            for key, tree in parts.items()
            if not key.startswith(OPTIMIZER)
            for name in tensor_names(tree)
        }
        residuals = manifest.residuals
        self.run(
            "read_state",
            state={
                "tensors": asdict(manifest.tensors),
                "residuals": None if residuals is None else asdict(residuals),
                "skeleton": skeleton,
                "own": sorted(own),
            },
        )
        unread = {*tensor_names(skeleton), *others} - own
        return {
            **{name: torch.empty(0, device="meta") for name in unread},
            **self._storage.own,
            **self._storage.progress.held,
        }


class RankStateWriter(StateWriter):
    """Writes the state of all ranks, always from a copy of it."""

    def __init__(self, state: ReplicaState, storage: RankStorage) -> None:
        super().__init__(state)
        self._storage = storage
        self._copy = 0

    def _check(self) -> None:
        check_storable(self.tensors)

    def copy(self) -> None:
        if not self._copy:
            self._copy = self._storage.copy_state(self.tensors, [*self.residuals])
            self.tensors = {}

    def _put(
        self, store: Store, key: str, check: Callable[[], None]
    ) -> tuple[StoredObject, StoredObject | None]:
        self.copy()
        return self._storage.put_state(self._copy, key, check)


def _parts_of(tree: Any) -> dict[str, Any]:
    """Return the trees in the tree of a saved state by name."""
    match tree:
        case {"dict": list(items)}:
            return {item[0]: item[1] for item in items if _is_named(item)}
    return {}


def _is_named(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2 and isinstance(item[0], str)


def _joined(key: str, results: Sequence[Written]) -> StoredObject | None:
    """Return the object of the pieces that all ranks have written, None if there are none."""
    written = sorted(piece for result in results for piece in result)
    if not written:
        return None
    sizes = tuple(size_bytes for _, size_bytes, _ in written)
    return StoredObject(
        key=key,
        size_bytes=sum(sizes),
        checksums="".join(checksums for _, _, checksums in written),
        pieces=sizes if len(sizes) > 1 else None,
    )
