"""The saved state of a replica: inner optimizer, residuals, data position.

It is saved periodically by replica number, so that the next process of the replica continues from
it and the *global* weights; local progress that was not contributed is lost with its process. The
newest complete save is used; its manifest is written last and has the digests. A residual is
dropped if a round after the save included a contribution of this replica to its fragment, because
then the global weights contain a part of it.

A process that leaves can contribute early to rounds that are decided after it has exited. Its state
lists them, with the residual to use if they are included. The next process does not contribute to
these rounds, because that would replace the early contribution.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from diloco.errors import ReplicaError
from diloco.model.state_tree import join_tree, split_tree
from diloco.model.tensor_file import TensorWriter
from diloco.protocol import keys
from diloco.protocol.reading import read_record
from diloco.protocol.records import (
    BadRecord,
    HandedInRound,
    Identity,
    ReplicaStateManifest,
    StoredObject,
)
from diloco.store.base import MissingKey, Store
from diloco.training.stored_objects import load_tensors, put_parts

log = logging.getLogger(__name__)

RESIDUAL, LEFT_OUT = "residual.", "left_out."
"""Prefixes of tensor names, followed by the number of a fragment or a round."""
_RESIDUAL_NAME = re.compile(r"(?:residual|left_out)\.(?:0|[1-9][0-9]{0,7})")
KEPT = 1
"""Number of older saves that are kept, for readers that have just listed them."""


@dataclass(frozen=True, kw_only=True)
class EarlyContribution:
    """A contribution to a round that was open when its writer left. ``residual`` (n,) is the error
    feedback to keep if the round includes it."""

    incarnation: str
    residual: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ReplicaState:
    """The state after ``round``. ``trees`` are state dicts by name (inner optimizer and the
    caller's ``stateful``); ``residuals`` are by fragment, ``early`` by round. ``data_step`` is the
    first step that is not contributed."""

    round: int
    tokens: int
    trees: Mapping[str, Any]
    residuals: Mapping[int, Tensor]
    early: Mapping[int, EarlyContribution] = field(default_factory=dict)
    data_step: int = 0


class StateWriter:
    """Writes one state, part by part.

    The tensors of ``state`` must not change until it is written, unless :meth:`copy` was called.
    Raises :class:`TypeError` for a state dict with other values than plain ones and tensors.
    """

    def __init__(self, state: ReplicaState) -> None:
        self._tree, self.tensors = split_tree(dict(state.trees))
        self.residuals = {f"{RESIDUAL}{n}": residual for n, residual in state.residuals.items()}
        for round, early in state.early.items():
            if early.residual is not None:
                self.residuals[f"{LEFT_OUT}{round}"] = early.residual
        self._round, self._tokens, self._data_step = state.round, state.tokens, state.data_step
        self._early = tuple(
            HandedInRound(round=round, incarnation=early.incarnation)
            for round, early in sorted(state.early.items())
        )
        self._check()

    def _check(self) -> None:
        self._contents = TensorWriter({**self.tensors, **self.residuals})
        self.tensors, self.residuals = {}, {}  # so that a copy releases each of them

    def copy(self) -> None:
        """Copy the tensors to host memory; they can change afterwards."""
        self._contents.copy()

    def _put(
        self, store: Store, key: str, check: Callable[[], None]
    ) -> tuple[StoredObject, StoredObject | None]:
        """Store the tensors; return their object, and that of the residuals if it is another."""
        return put_parts(store, f"{key}.safetensors", self._contents.parts, check=check), None

    def write(
        self,
        store: Store,
        identity: Identity,
        *,
        wall_s: float,
        name: str = "state",
        replaces: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> ReplicaStateManifest:
        """Write the tensors, then the manifest; then delete older saves of this replica.

        A second save after the same round ``replaces`` the first one and has another ``name``, so
        that the first one remains complete until the new manifest exists. The first one does not
        replace the second, even if its last request arrives later, on a store with atomic create
        (on another one only the coordinator can create). ``check`` is called before each part and
        before the manifest is written; its exception leaves a save without a manifest, which
        readers ignore.
        """
        folder = keys.replica_state_dir(identity.replica, identity.incarnation, self._round)
        stored, residuals = self._put(store, f"{folder}{name}", check)
        manifest = ReplicaStateManifest(
            writer=identity,
            round=self._round,
            tokens=self._tokens,
            tree=self._tree,
            tensors=stored,
            residuals=residuals,
            handed_in=self._early,
            data_step=self._data_step,
            wall_s=wall_s,
        )
        check()
        key = keys.replica_state_manifest(identity.replica, identity.incarnation, self._round)
        if replaces or not store.atomic_create:
            store.put(key, manifest.to_bytes())
        else:
            store.create(key, manifest.to_bytes())
        _delete_older(store, identity.replica, folder)
        return manifest


def _delete_older(store: Store, replica: int, folder: str) -> None:
    """Delete the saves before ``folder``, except the newest :data:`KEPT`."""
    listed = [info.key for info in store.list(keys.replica_state(replica))]
    # The listing can be stale and lack this save.
    folders = sorted({key.rsplit("/", 1)[0] + "/" for key in listed} | {folder})
    old = tuple(folders[: folders.index(folder)][: -KEPT or None])
    store.delete([key for key in listed if old and key.startswith(old)])


def _is_of(key: str, manifest: ReplicaStateManifest) -> bool:
    writer = manifest.writer
    return key == keys.replica_state_manifest(writer.replica, writer.incarnation, manifest.round)


def is_residual(name: str) -> bool:
    """Return whether a tensor of a saved state is a residual. A number has one spelling, so that no
    two names are of one fragment."""
    return _RESIDUAL_NAME.fullmatch(name) is not None


def fragment_of(name: str, fragments: int) -> int:
    """Return the fragment of a residual by its name (:func:`is_residual`)."""
    if name.startswith(RESIDUAL):
        return int(name.removeprefix(RESIDUAL))
    return (int(name.removeprefix(LEFT_OUT)) - 1) % fragments


class StateReader(Protocol):
    """Reads a saved state for a replica of several ranks."""

    def read_state(self, manifest: ReplicaStateManifest) -> dict[str, Tensor]:
        """Read the tensors on all ranks; return by name those of the caller's objects, the leader's
        slices of the residuals, and for other tensors ones on the meta device."""
        ...


def _read_tensors(
    store: Store, manifest: ReplicaStateManifest, reader: StateReader | None
) -> dict[str, Tensor]:
    """Read the tensors of a saved state, and the residuals that this process holds."""
    if reader is not None:
        return reader.read_state(manifest)
    tensors = load_tensors(store, manifest.tensors)
    if manifest.residuals is not None:
        tensors |= load_tensors(store, manifest.residuals)
    return tensors


def load_replica_state(
    store: Store, replica: int, reader: StateReader | None = None
) -> ReplicaState | None:
    """Load the newest complete save of a replica number; return None if none can be read. With a
    ``reader`` the residuals are slices."""
    saves = [
        info.key
        for info in store.list(keys.replica_state(replica))
        if keys.parse_replica_state(info.key)
    ]
    for key in sorted(saves, reverse=True):
        try:
            manifest = read_record(store, key, ReplicaStateManifest, is_right=partial(_is_of, key))
            tensors = _read_tensors(store, manifest, reader)
            trees = join_tree(manifest.tree, tensors)
        except (BadRecord, MissingKey, ReplicaError, ValueError) as error:
            log.warning("saved state %s is refused: %s", key, error)
            continue
        residuals = {
            int(name.removeprefix(RESIDUAL)): tensor
            for name, tensor in tensors.items()
            if is_residual(name) and name.startswith(RESIDUAL)
        }
        return ReplicaState(
            round=manifest.round,
            tokens=manifest.tokens,
            trees=trees,
            residuals=residuals,
            early={
                early.round: EarlyContribution(
                    incarnation=early.incarnation,
                    residual=tensors.get(f"{LEFT_OUT}{early.round}"),
                )
                for early in manifest.handed_in
            },
            data_step=manifest.data_step,
        )
    return None
