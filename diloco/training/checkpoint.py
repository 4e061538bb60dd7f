"""Checkpoints of the global weights and the outer optimizer.

A writer first stores the objects below its own prefix and then creates the manifest, which can be
created only once. So readers never see an incomplete checkpoint, and a writer that loses the race
has no effect. The format is safetensors, never pickle (I7). Objects are written and read part by
part (:mod:`diloco.training.stored_objects`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from diloco.errors import DamagedObject, ReplicaError
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.model.outer_rules import COMMITTED_TOTAL
from diloco.model.rounding import DTYPES
from diloco.model.tensor_file import Entry, Window
from diloco.protocol import keys
from diloco.protocol.blocks import Span
from diloco.protocol.pieces import keys_of
from diloco.protocol.reading import Damaged, read_record
from diloco.protocol.records import (
    CheckpointManifest,
    Identity,
    StoredObject,
    TensorEntry,
)
from diloco.protocol.round_view import Totals
from diloco.store.base import MissingKey, Store
from diloco.training.model_check import check_model
from diloco.training.stored_objects import load_windows, put_tensors

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The global state after ``round`` from a checkpoint; ``weights`` are the elements that this
    process holds."""

    round: int
    weights: Tensor
    base_rounds: tuple[int, ...]
    totals: Totals


class VectorStorage(Protocol):
    """The processes that write and read the checkpoints of a replica together."""

    def put_weights(self, key: str, weights: Tensor, *, check: Callable[[], None]) -> StoredObject:
        """Store the global weights, of which this process holds ``weights``, by tensor name."""
        ...

    def put_outer(
        self,
        key: str,
        vectors: Mapping[str, Tensor],
        committed: int,
        *,
        check: Callable[[], None],
    ) -> StoredObject:
        """Store the state vectors of the outer rule, and the number of committed rounds."""
        ...

    def digest(self, weights: Tensor) -> str:
        """Return the digest of all global weights."""
        ...

    def load(self, manifest: CheckpointManifest, outer: OuterOptimizer) -> Restored:
        """Load a checkpoint; see :func:`load_checkpoint`."""
        ...


class WholeVectors:
    """The storage of a replica of one process, which holds all elements."""

    def __init__(self, store: Store, layout: Layout) -> None:
        self._store = store
        self._layout = layout

    def put_weights(self, key: str, weights: Tensor, *, check: Callable[[], None]) -> StoredObject:
        return put_tensors(self._store, key, self._layout.split(weights), check=check)

    def put_outer(
        self,
        key: str,
        vectors: Mapping[str, Tensor],
        committed: int,
        *,
        check: Callable[[], None],
    ) -> StoredObject:
        count = torch.tensor(committed, dtype=torch.int64)
        return put_tensors(self._store, key, {**vectors, COMMITTED_TOTAL: count}, check=check)

    def digest(self, weights: Tensor) -> str:
        return self._layout.model_digest(weights)

    def load(self, manifest: CheckpointManifest, outer: OuterOptimizer) -> Restored:
        return load_checkpoint(self._store, manifest, self._layout, outer)


def save_checkpoint(
    store: Store,
    identity: Identity,
    layout: Layout,
    *,
    round: int,
    weights: Tensor,
    base_rounds: tuple[int, ...],
    outer: OuterOptimizer,
    totals: Totals,
    wall_s: float,
    replace: bool = False,
    check: Callable[[], None] = lambda: None,
    storage: VectorStorage | None = None,
) -> CheckpointManifest | None:
    """Write the global state after ``round``, by default from this process alone. Returns None if
    another writer's manifest exists.

    ``weights`` and the state of ``outer`` must not change meanwhile. ``replace`` overwrites a
    manifest whose objects are damaged. All replicas have the same bits after a round, so any
    writer's manifest is valid. ``check`` is called before each part and before the manifest is
    written; its exception leaves a checkpoint without a manifest, which readers ignore.
    """
    folder = keys.checkpoint_dir(round, identity.replica, identity.incarnation)
    storage = storage or WholeVectors(store, layout)
    stored = storage.put_weights(f"{folder}weights.safetensors", weights, check=check)
    stored_outer = storage.put_outer(
        f"{folder}outer.safetensors", outer.vectors, totals.committed, check=check
    )
    manifest = CheckpointManifest(
        round=round,
        writer=identity,
        model_hash=layout.model_hash,
        base_rounds=base_rounds,
        tensors=tuple(
            TensorEntry(name=t.name, shape=t.shape, dtype=t.dtype, embedding=t.embedding)
            for t in layout.tensors
        ),
        weights_digest=storage.digest(weights),
        weights=stored,
        outer=stored_outer,
        tokens_total=totals.tokens,
        wall_s=wall_s,
        frozen=layout.frozen,
    )
    check()
    if replace:
        store.put(keys.checkpoint_manifest(round), manifest.to_bytes())
        return manifest
    won = store.create(keys.checkpoint_manifest(round), manifest.to_bytes())
    if not won and not _may_name(store, round, identity):
        store.delete([*keys_of(stored), *keys_of(stored_outer)])
    return manifest if won else None


def _may_name(store: Store, round: int, identity: Identity) -> bool:
    """Return whether the existing manifest of a round names the objects of this process, which can
    have written the same checkpoint before; True for one that cannot be read."""
    try:
        return read_manifest(store, round).writer == identity
    except MissingKey:
        return False
    except Damaged:
        return True


def newest_manifest(store: Store) -> CheckpointManifest | None:
    """Return the newest readable checkpoint manifest, or None."""
    return next(manifests(store), None)


def manifests(store: Store) -> Iterator[CheckpointManifest]:
    """Yield the readable checkpoint manifests, newest first; damaged ones are skipped."""
    for round in reversed(manifest_rounds(store)):
        key = keys.checkpoint_manifest(round)
        try:
            yield read_manifest(store, round)
        except Damaged as error:
            log.error("%s; trying an older checkpoint", error)
        except MissingKey:
            log.warning("%s was deleted after it was listed", key)


def read_manifest(store: Store, round: int) -> CheckpointManifest:
    return read_record(
        store,
        keys.checkpoint_manifest(round),
        CheckpointManifest,
        is_right=lambda manifest: manifest.round == round,
    )


def manifest_rounds(store: Store) -> list[int]:
    """Return the rounds that have a checkpoint manifest, ascending."""
    rounds = (keys.parse_checkpoint_manifest(info.key) for info in store.list(keys.CHECKPOINTS))
    return sorted(round for round in rounds if round is not None)


def load_checkpoint(
    store: Store, manifest: CheckpointManifest, layout: Layout, outer: OuterOptimizer
) -> Restored:
    """Load a checkpoint: the optimizer state into ``outer``; return the rest.

    Raises :class:`~diloco.errors.ModelMismatch` for a checkpoint of another model or other frozen
    parameters, :class:`MissingKey` if it was deleted after its manifest was read, and
    :class:`DamagedObject` if an object is damaged.
    """
    check_model(manifest, layout)
    loaded = read_vectors(store, manifest.weights, manifest.outer, layout, outer)
    outer.vectors.update(loaded.outer)
    return restored(manifest, loaded)


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """The held elements of a checkpoint's weights and outer state, and the number of committed
    rounds."""

    weights: Tensor
    outer: dict[str, Tensor]
    committed: int


def restored(manifest: CheckpointManifest, loaded: Vectors) -> Restored:
    """Return the state of a checkpoint without that of the outer rule."""
    return Restored(
        round=manifest.round,
        weights=loaded.weights,
        base_rounds=manifest.base_rounds,
        totals=Totals(committed=loaded.committed, tokens=manifest.tokens_total),
    )


def read_vectors(
    store: Store,
    weights: StoredObject,
    outer_state: StoredObject | None,
    layout: Layout,
    outer: OuterOptimizer,
) -> Vectors:
    """Read the elements of a checkpoint that this process holds, with the dtypes of ``outer``,
    which does not change. Without an outer state, as in a fork, the vectors are zero. Raises the
    errors of :func:`load_checkpoint`."""
    held = _read_weights(store, weights, layout, outer.weights_dtype)
    if outer_state is None:
        return Vectors(weights=held, outer=outer.zeros(layout.held_numel), committed=0)
    vectors, committed = _read_outer(store, outer_state, layout, outer)
    return Vectors(weights=held, outer=vectors, committed=committed)


def _read_weights(
    store: Store, described: StoredObject, layout: Layout, dtype: torch.dtype
) -> Tensor:
    """Read the held elements of the flat vector. Those in the other dtype, of a fork or of
    checkpoint 0, are read into new tensors first."""
    held = torch.empty(layout.held_numel, dtype=dtype)
    missing = {slot.name: slot for slot in layout.slots}
    other_dtype: list[tuple[Tensor, Tensor]] = []

    def windows(entry: Entry) -> Iterator[Window]:
        slot = missing.pop(entry.name, None)
        if slot is None or slot.shape != entry.shape or entry.dtype not in DTYPES.values():
            expected = "no such tensor" if slot is None else f"{dtype} of {list(slot.shape)}"
            raise DamagedObject(
                f"{described.key}: {entry.name}: expected {expected}, found {entry.dtype} of "
                f"{list(entry.shape)}"
            )
        for span, at in layout.held_parts(Span(slot.offset, slot.stop)):
            into = held[at : at + span.numel]
            if entry.dtype != dtype:
                found = torch.empty(span.numel, dtype=entry.dtype)
                other_dtype.append((into, found))
                into = found
            yield Window(span.start - slot.offset, into)

    load_windows(store, described, windows)
    if missing:
        expected = min(missing)
        raise DamagedObject(f"{described.key}: expected a tensor {expected!r}, found none")
    for into, found in other_dtype:
        into.copy_(found)
    return held


def _read_outer(
    store: Store, described: StoredObject, layout: Layout, outer: OuterOptimizer
) -> tuple[dict[str, Tensor], int]:
    """Read the held elements of the state vectors of the outer rule, and the number of committed
    rounds."""
    vectors: dict[str, Tensor] = {}
    other: dict[str, int] = {}
    counts: list[Tensor] = []

    def windows(entry: Entry) -> Iterator[Window]:
        numel = math.prod(entry.shape)
        if entry.name == COMMITTED_TOTAL and numel == 1 and entry.dtype == torch.int64:
            counts.append(torch.empty(1, dtype=torch.int64))
            yield Window(0, counts[0])
        elif entry.shape != (layout.numel,) or entry.dtype not in DTYPES.values():
            other[entry.name] = numel
        elif entry.name in outer.vectors:
            vector = vectors[entry.name] = torch.empty(layout.held_numel, dtype=entry.dtype)
            for span, at in layout.held_parts(Span(0, layout.numel)):
                yield Window(span.start, vector[at : at + span.numel])

    load_windows(store, described, windows)
    for name in outer.vectors:
        if name not in vectors:
            raise ReplicaError(
                f"{described.key}: expected {layout.numel} elements of {name!r}, a state vector of "
                f"the group's outer rule, found {other.get(name) or 'none'}"
            )
    if not counts or counts[0] < 0:
        raise DamagedObject(
            f"{described.key}: expected {COMMITTED_TOTAL!r}, an integer of at least 0, found "
            f"{int(counts[0]) if counts else 'none'}"
        )
    return {name: vector.to(outer.state_dtype) for name, vector in vectors.items()}, int(counts[0])
