"""The final result of a run: weights, config and summary, and the manifest that names them.

As with checkpoints, a writer first stores the objects below its own prefix and then creates the
manifest, which can be created only once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from diloco.protocol import keys
from diloco.protocol.reading import read_record
from diloco.protocol.records import FinalManifest, Identity, StoredObject
from diloco.store.base import MissingKey, Store
from diloco.training.stored_objects import put_object, put_tensors

PutFinal = Callable[[Store, str, Mapping[str, Tensor]], StoredObject]
"""Stores tensors as safetensors under a key, with the sha256 of the object."""


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
    put: PutFinal | None = None,
) -> bool:
    """Write weights, config and summary, then the manifest. Returns False if another writer's
    manifest exists. ``put`` stores ``tensors`` that this process does not hold whole."""
    put = put or partial(put_tensors, sha256=True)
    folder = keys.final_dir(identity.replica, identity.incarnation)
    manifest = FinalManifest(
        round=round,
        reason=reason,
        writer=identity,
        weights_digest=weights_digest,
        weights=put(store, f"{folder}model.safetensors", tensors),
        config=put_object(store, f"{folder}config.json", _json(config)),
        summary=put_object(store, f"{folder}summary.json", _json(summary)),
        wall_s=wall_s,
    )
    return store.create(keys.FINAL_MANIFEST, manifest.to_bytes())


def read_final(store: Store) -> FinalManifest | None:
    """Return the final manifest, or None if the run has not ended.

    Raises :class:`~diloco.protocol.reading.Damaged`.
    """
    try:
        return read_record(store, keys.FINAL_MANIFEST, FinalManifest)
    except MissingKey:
        return None


def sweep_results(store: Store, final: FinalManifest) -> None:
    """Delete the results of writers that lost the race for the final manifest."""
    writer = final.writer
    own = keys.final_dir(writer.replica, writer.incarnation)
    listed = [info.key for info in store.list(keys.FINAL)]
    obsolete = [key for key in listed if key != keys.FINAL_MANIFEST and not key.startswith(own)]
    if obsolete:
        store.delete(obsolete)


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"
