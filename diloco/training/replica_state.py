"""What is a replica's own: inner optimizer, residual, data position.

Saved now and then under the replica's number, so that a relaunch under the same identity goes on
where the last process stopped, from the *global* weights: local progress that was not contributed
is lost with its process. The newest complete save wins; its manifest is written last and names
objects and digests. A residual is dropped if any round after the save took a contribution of this
replica in the residual's fragment, because then part of it is in the global weights already.

A process that is asked to leave may hand in contributions to rounds that are decided after it has
gone. Its state names them, with what error feedback is to keep if they are taken; its successor
contributes nothing to these rounds, or it would take the place of what lies there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from safetensors.torch import save as save_safetensors
from torch import Tensor

from diloco.errors import ReplicaError
from diloco.model.state_tree import join_tree, split_tree
from diloco.protocol import keys
from diloco.protocol.reading import read_record
from diloco.protocol.records import BadRecord, HandedInRound, Identity, ReplicaStateManifest
from diloco.store.base import MissingKey, Store
from diloco.training.checkpoint import load_tensors, put_object

log = logging.getLogger(__name__)

RESIDUAL, LEFT_OUT = "residual.", "left_out."
"""Names of tensors, before the number of a fragment and of a round."""
KEPT = 1
"""Older saves that stay beside the newest, for a reader that has just listed them."""


@dataclass(frozen=True, kw_only=True)
class HandedIn:
    """A contribution to a round that was open when its writer left. ``residual`` is what is left
    out of it, if the round takes it."""

    incarnation: str
    residual: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ReplicaState:
    """After ``round``. ``trees`` are state dicts by name (inner optimizer, the caller's own);
    ``residuals`` by fragment, ``handed_in`` by round. ``data_step`` is the first step whose data
    is not in what was handed in."""

    round: int
    tokens: int
    trees: Mapping[str, Any]
    residuals: Mapping[int, Tensor]
    handed_in: Mapping[int, HandedIn] = field(default_factory=dict)
    data_step: int = 0


def save_replica_state(
    store: Store,
    identity: Identity,
    state: ReplicaState,
    *,
    wall_s: float,
    name: str = "state",
) -> ReplicaStateManifest:
    """Write the state, then the manifest, then delete this replica's older saves.

    A second save after one round has another ``name``, so that the first stays whole until the new
    manifest is there.

    Raises :class:`TypeError` for a state dict that is more than plain values and tensors.
    """
    skeleton, tensors = split_tree(dict(state.trees))
    folder = keys.replica_state_dir(identity.replica, identity.incarnation, state.round)
    own = {f"{RESIDUAL}{fragment}": tensor for fragment, tensor in state.residuals.items()}
    for round, handed in state.handed_in.items():
        if handed.residual is not None:
            own[f"{LEFT_OUT}{round}"] = handed.residual
    manifest = ReplicaStateManifest(
        writer=identity,
        round=state.round,
        tokens=state.tokens,
        tree=skeleton,
        tensors=put_object(
            store, f"{folder}{name}.safetensors", save_safetensors({**tensors, **own})
        ),
        handed_in=tuple(
            HandedInRound(round=round, incarnation=handed.incarnation)
            for round, handed in sorted(state.handed_in.items())
        ),
        data_step=state.data_step,
        wall_s=wall_s,
    )
    key = keys.replica_state_manifest(identity.replica, identity.incarnation, state.round)
    store.put(key, manifest.to_bytes())
    listed = [info.key for info in store.list(keys.replica_state(identity.replica))]
    # A listing may be older than this save, and then the save is not in it.
    folders = sorted({key.rsplit("/", 1)[0] + "/" for key in listed} | {folder})
    old = tuple(folders[: folders.index(folder)][: -KEPT or None])
    store.delete([key for key in listed if old and key.startswith(old)])
    return manifest


def _is_of(key: str, manifest: ReplicaStateManifest) -> bool:
    writer = manifest.writer
    return key == keys.replica_state_manifest(writer.replica, writer.incarnation, manifest.round)


def load_replica_state(store: Store, replica: int) -> ReplicaState | None:
    """The newest complete save of a replica number; None if there is none that can be read."""
    saves = [
        info.key
        for info in store.list(keys.replica_state(replica))
        if keys.parse_replica_state(info.key)
    ]
    for key in sorted(saves, reverse=True):
        try:
            manifest = read_record(store, key, ReplicaStateManifest, is_right=partial(_is_of, key))
            tensors = load_tensors(store, manifest.tensors)
            trees = join_tree(manifest.tree, tensors)
        except (BadRecord, MissingKey, ReplicaError, ValueError) as error:
            log.warning("saved state %s is refused: %s", key, error)
            continue
        residuals = {
            int(name.removeprefix(RESIDUAL)): tensor
            for name, tensor in tensors.items()
            if name.startswith(RESIDUAL)
        }
        return ReplicaState(
            round=manifest.round,
            tokens=manifest.tokens,
            trees=trees,
            residuals=residuals,
            handed_in={
                handed.round: HandedIn(
                    incarnation=handed.incarnation,
                    residual=tensors.get(f"{LEFT_OUT}{handed.round}"),
                )
                for handed in manifest.handed_in
            },
            data_step=manifest.data_step,
        )
    return None
