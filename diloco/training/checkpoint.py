"""Checkpoints of the global weights and the outer optimizer, and the final result.

An object is written under its writer's own name and only then named by a create-once manifest, so
a reader never sees half a checkpoint and a writer that loses the race harms nobody. Formats:
safetensors, never pickle (I7).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from diloco.errors import DamagedObject, ModelMismatch, ReplicaError
from diloco.exchange.upload import UPLOADS, bytes_to_verify
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer, digest
from diloco.protocol import keys
from diloco.protocol.reading import READS, Damaged, read_record
from diloco.protocol.records import (
    CheckpointManifest,
    FinalManifest,
    Identity,
    StoredObject,
    TensorEntry,
)
from diloco.protocol.round_view import Totals
from diloco.store.base import MissingKey, ObjectTooLarge, Store

log = logging.getLogger(__name__)


def put_object(store: Store, key: str, data: bytes) -> StoredObject:
    """Store ``data``, read it back up to a limit, and describe it for a manifest."""
    for _ in range(UPLOADS):
        store.put(key, data)
        if _is_stored(store, key, data, limit=bytes_to_verify()):
            break
        log.warning("%s was damaged on its way; it is uploaded again", key)
    return StoredObject(key=key, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _is_stored(store: Store, key: str, data: bytes, *, limit: int) -> bool:
    """Whether the store has ``data`` under ``key``: its beginning and its end, half the ``limit``
    each. One damaged read proves nothing, so what is wrong is read once more."""
    half = min(len(data), -(-limit // 2))
    ranges = [(0, half)] if half == len(data) else [(0, half), (len(data) - half, half)]

    def is_right(start: int, length: int) -> bool:
        try:
            return store.get_range(key, start, length) == data[start : start + length]
        except MissingKey:
            return False

    return not half or all(is_right(*where) or is_right(*where) for where in ranges)


def get_object(store: Store, described: StoredObject) -> bytes:
    """The object a manifest names. Raises :class:`DamagedObject` if it is not what the manifest
    says, after some more reads."""
    for _ in range(READS):
        try:
            data = store.get(described.key, limit=described.size_bytes)
        except ObjectTooLarge as error:
            raise DamagedObject(str(error)) from None
        found = hashlib.sha256(data).hexdigest()
        if found == described.sha256:
            return data
        log.warning("%s: expected sha256 %s, found %s", described.key, described.sha256, found)
    raise DamagedObject(f"{described.key}: expected sha256 {described.sha256}, found {found}")


def load_tensors(store: Store, described: StoredObject) -> dict[str, Tensor]:
    try:
        return load_safetensors(get_object(store, described))
    except SafetensorError as error:
        raise DamagedObject(f"{described.key}: expected safetensors, found {error}") from None


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
    replace: bool = False,
) -> CheckpointManifest | None:
    """Write the global state after ``round``; None if another writer's manifest was first.

    ``replace`` puts the manifest in the place of one whose objects are damaged. All replicas have
    the same bits after a round, so it does not matter whose manifest stays.
    """
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
    if replace:
        store.put(keys.checkpoint_manifest(round), manifest.to_bytes())
        return manifest
    won = store.create(keys.checkpoint_manifest(round), manifest.to_bytes())
    if not won:
        store.delete([f"{folder}weights.safetensors", f"{folder}outer.safetensors"])
    return manifest if won else None


def newest_manifest(store: Store) -> CheckpointManifest | None:
    """The manifest of the newest complete checkpoint that can be read."""
    return next(manifests(store), None)


def manifests(store: Store) -> Iterator[CheckpointManifest]:
    """The manifests that can be read, newest first; damaged ones are passed over."""
    for round in reversed(manifest_rounds(store)):
        key = keys.checkpoint_manifest(round)
        try:
            yield _read_manifest(store, round)
        except Damaged as error:
            log.error("%s; an older checkpoint is tried", error)
        except MissingKey:
            log.warning("%s was listed and is gone", key)


def _read_manifest(store: Store, round: int) -> CheckpointManifest:
    return read_record(
        store,
        keys.checkpoint_manifest(round),
        CheckpointManifest,
        is_right=lambda manifest: manifest.round == round,
    )


def manifest_rounds(store: Store) -> list[int]:
    """Rounds that have a checkpoint manifest, ascending."""
    found = (keys.parse_checkpoint_manifest(info.key) for info in store.list(keys.CHECKPOINTS))
    return sorted(round for round in found if round is not None)


def load_checkpoint(
    store: Store, manifest: CheckpointManifest, layout: Layout, outer: OuterOptimizer
) -> Restored:
    """Load into ``outer`` and return the rest.

    Raises :class:`ModelMismatch` if the checkpoint is of another model, :class:`MissingKey` if it
    has been swept since its manifest was read, :class:`DamagedObject` if an object is damaged.
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


SWEPT_AGAIN = 3
"""Each checkpoint's sweep looks again at the rounds of so many checkpoints before."""
SWEPT_AT_THE_END = 2000
"""The last sweep of a run looks at so many rounds."""


def sweep(store: Store, *, at_the_end: bool = False) -> int:
    """Delete what no joiner needs any more; returns the number of objects deleted.

    Kept: the newest two complete checkpoints, what was exchanged in rounds after the older, and
    all records, plans, commits and manifests for ever. What an earlier sweep has missed (its
    process died, or an upload arrived after it) is deleted by a later one: each lists the rounds of
    the last checkpoints again, and that ``at_the_end`` of a run many more. So it makes one request
    a round, and looks at a round :data:`SWEPT_AGAIN` + 1 times.
    """
    listed = [info.key for info in store.list(keys.CHECKPOINTS)]
    manifests = {
        key: round for key in listed if (round := keys.parse_checkpoint_manifest(key)) is not None
    }
    rounds = sorted(manifests.values())
    if len(rounds) < 2:
        return 0
    older = rounds[-2]
    first = rounds[max(0, len(rounds) - 3 - SWEPT_AGAIN)] + 1
    if at_the_end:
        first = min(first, max(1, older + 1 - SWEPT_AT_THE_END))
    # A checkpoint of a later round than the older one may be about to get its manifest.
    limit = f"{keys.CHECKPOINTS}{older:08d}/"
    doomed = [key for key in listed if key not in manifests and key < limit]
    for round in range(first, older + 1):
        doomed += [
            info.key for info in store.list(keys.round_dir(round)) if keys.is_exchanged(info.key)
        ]
    if doomed:
        store.delete(doomed)
    return len(doomed)


def sweep_results(store: Store, final: FinalManifest) -> None:
    """Delete what other writers have left of a result that is not the run's."""
    writer = final.writer
    own = keys.final_dir(writer.replica, writer.incarnation)
    listed = [info.key for info in store.list(keys.FINAL)]
    doomed = [key for key in listed if key != keys.FINAL_MANIFEST and not key.startswith(own)]
    if doomed:
        store.delete(doomed)


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
    """The result's manifest, None while there is none.

    Raises :class:`~diloco.protocol.reading.Damaged`.
    """
    try:
        return read_record(store, keys.FINAL_MANIFEST, FinalManifest)
    except MissingKey:
        return None


def _owned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies: safetensors refuses tensors that share memory."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"
