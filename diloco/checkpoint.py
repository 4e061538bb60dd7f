"""Checkpoints of the global weights and the outer optimizer, and the final result.

An object is written under its writer's own name and only then named by a create-once manifest, so
a reader never sees half a checkpoint and a writer that loses the race harms nobody. Formats:
safetensors, never pickle (I7).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from diloco.errors import ModelMismatch, ReplicaError
from diloco.layout import Layout
from diloco.outer import OuterOptimizer, digest
from diloco.rendezvous import keys
from diloco.rendezvous.records import (
    CheckpointManifest,
    FinalManifest,
    Identity,
    StoredObject,
    TensorEntry,
)
from diloco.rendezvous.store import MissingKey, ObjectTooLarge, Store
from diloco.rendezvous.view import Totals


def put_object(store: Store, key: str, data: bytes) -> StoredObject:
    """Store ``data`` and describe it for a manifest."""
    store.put(key, data)
    return StoredObject(key=key, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def get_object(store: Store, described: StoredObject) -> bytes:
    """The object a manifest names. Raises :class:`ReplicaError` if it is not what it says."""
    try:
        data = store.get(described.key, limit=described.size_bytes)
    except ObjectTooLarge as error:
        raise ReplicaError(str(error)) from None
    found = hashlib.sha256(data).hexdigest()
    if found != described.sha256:
        raise ReplicaError(f"{described.key}: expected sha256 {described.sha256}, found {found}")
    return data


def load_tensors(store: Store, described: StoredObject) -> dict[str, Tensor]:
    try:
        return load_safetensors(get_object(store, described))
    except SafetensorError as error:
        raise ReplicaError(f"{described.key}: expected safetensors, found {error}") from None


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Global state after ``round``, as a checkpoint holds it."""

    round: int
    weights: Tensor
    base_rounds: tuple[int, ...]
    totals: Totals


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
) -> CheckpointManifest | None:
    """Write the global state after ``round``; None if another writer's manifest was first."""
    folder = keys.checkpoint_dir(round, identity.replica, identity.incarnation)
    stored = put_object(
        store, f"{folder}weights.safetensors", save_safetensors(_owned(layout.split(weights)))
    )
    momentum = save_safetensors(
        {
            "momentum": outer.buffer,
            "committed_total": torch.tensor(totals.committed, dtype=torch.int64),
        }
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
        weights_digest=digest(weights),
        weights=stored,
        outer=put_object(store, f"{folder}outer.safetensors", momentum),
        tokens_total=totals.tokens,
        wall_s=wall_s,
    )
    won = store.create(keys.checkpoint_manifest(round), manifest.to_bytes())
    if not won:
        store.delete([f"{folder}weights.safetensors", f"{folder}outer.safetensors"])
    return manifest if won else None


def newest_manifest(store: Store) -> CheckpointManifest | None:
    """The manifest of the newest complete checkpoint."""
    rounds = manifest_rounds(store)
    if not rounds:
        return None
    return CheckpointManifest.read(store, keys.checkpoint_manifest(rounds[-1]))


def manifest_rounds(store: Store) -> list[int]:
    """Rounds that have a checkpoint manifest, ascending."""
    found = (keys.parse_checkpoint_manifest(info.key) for info in store.list(keys.CHECKPOINTS))
    return sorted(round for round in found if round is not None)


def load_checkpoint(
    store: Store, manifest: CheckpointManifest, layout: Layout, outer: OuterOptimizer
) -> Restored:
    """Load into ``outer`` and return the rest.

    Raises :class:`ModelMismatch` if the checkpoint is of another model, :class:`MissingKey` if it
    has been swept since its manifest was read.
    """
    if manifest.model_hash != layout.model_hash:
        raise ModelMismatch(_difference(manifest, layout))
    weights = layout.join(load_tensors(store, manifest.weights))
    committed = 0
    if manifest.outer is not None:
        state = load_tensors(store, manifest.outer)
        if state["momentum"].numel() != layout.numel:
            raise ReplicaError(
                f"{manifest.outer.key}: expected {layout.numel} elements, "
                f"found {state['momentum'].numel()}"
            )
        outer.buffer.copy_(state["momentum"])
        committed = int(state["committed_total"])
    return Restored(
        round=manifest.round,
        weights=weights,
        base_rounds=manifest.base_rounds,
        totals=Totals(committed=committed, tokens=manifest.tokens_total),
    )


def _difference(manifest: CheckpointManifest, layout: Layout) -> str:
    """What the group's model has and this replica's has not, for :class:`ModelMismatch`."""
    expected = [(t.name, tuple(t.shape), t.dtype) for t in manifest.tensors]
    found = [(t.name, tuple(t.shape), t.dtype) for t in layout.tensors]
    pairs = list(zip_longest(expected, found))
    different = [index for index, (theirs, own) in enumerate(pairs) if theirs != own]
    remedy = ""
    if manifest.round == 0:
        remedy = (
            f". Replica {manifest.writer.replica} joined first and described the group's model. If "
            "that one is wrong and no round is committed, stop the replicas and run "
            "python -m diloco.init URI --replace-model"
        )
    fingerprints = (
        f"expected the group's model with fingerprint {manifest.model_hash}, found "
        f"{layout.model_hash}: "
    )
    if not different:
        return f"{fingerprints}the parameters are alike, but not which are embeddings{remedy}"
    theirs, own = pairs[different[0]]
    more = f", and {len(different) - 1} more differ" if len(different) > 1 else ""
    return (
        f"{fingerprints}parameter {different[0]}: expected {_described(theirs)} (of "
        f"{len(expected)} parameters), found {_described(own)} (of {len(found)}){more}{remedy}"
    )


def _described(parameter: tuple[str, tuple[int, ...], str] | None) -> str:
    if parameter is None:
        return "none"
    name, shape, dtype = parameter
    return f"{name} {list(shape)} {dtype}"


def sweep(store: Store) -> int:
    """Delete what no joiner needs any more; returns the number of objects deleted.

    Kept: the newest two complete checkpoints, what was exchanged in rounds after the older, and
    all records, plans, commits and manifests for ever. Bounded: it looks only at what has become
    superfluous since the checkpoint before.
    """
    listed = [info.key for info in store.list(keys.CHECKPOINTS)]
    manifests = {
        key: round for key in listed if (round := keys.parse_checkpoint_manifest(key)) is not None
    }
    rounds = sorted(manifests.values())
    if len(rounds) < 3:
        return 0
    older = rounds[-2]
    kept = tuple(f"{keys.CHECKPOINTS}{round:08d}/" for round in rounds[-2:])
    doomed = [key for key in listed if key not in manifests and not key.startswith(kept)]
    for round in range(rounds[-3] + 1, older + 1):
        doomed += [
            info.key for info in store.list(keys.contributions(round)) if info.key.endswith(".bin")
        ]
        doomed += [info.key for info in store.list(keys.reduced(round))]
    store.delete(doomed)
    return len(doomed)


def publish_final(
    store: Store,
    identity: Identity,
    *,
    round: int,
    reason: str,
    tensors: Mapping[str, Tensor],
    weights_digest: str,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    wall_s: float,
) -> bool:
    """Write weights, config and summary, then the manifest; False if another writer was first."""
    folder = keys.final_dir(identity.replica, identity.incarnation)
    manifest = FinalManifest(
        round=round,
        reason=reason,
        writer=identity,
        weights_digest=weights_digest,
        weights=put_object(store, f"{folder}model.safetensors", save_safetensors(_owned(tensors))),
        config=put_object(store, f"{folder}config.json", _json(config)),
        summary=put_object(store, f"{folder}summary.json", _json(summary)),
        wall_s=wall_s,
    )
    return store.create(keys.FINAL_MANIFEST, manifest.to_bytes())


def read_final(store: Store) -> FinalManifest | None:
    try:
        return FinalManifest.read(store, keys.FINAL_MANIFEST)
    except MissingKey:
        return None


def _owned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies: safetensors refuses tensors that share memory."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"
