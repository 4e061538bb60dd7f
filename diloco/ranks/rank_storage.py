"""The storage of a replica of several ranks: checkpoints and replica state, by the leader.

The leader sends the jobs (:mod:`diloco.ranks.jobs`) to all ranks
(:mod:`diloco.ranks.storage_work`), and writes the headers and the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from diloco.model.inner_state import BY_NAME, OPTIMIZER
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.model.outer_rules import COMMITTED_TOTAL
from diloco.model.tensor_file import check_storable, header_of, in_order
from diloco.protocol.records import CheckpointManifest, ReplicaStateManifest, StoredObject
from diloco.ranks.collective_ops import Operation, Ranks
from diloco.ranks.command_channel import StepMessage
from diloco.ranks.jobs import JobLeader
from diloco.ranks.state_share import SharedTensor, tensor_names
from diloco.ranks.storage_work import OUTER, WEIGHTS, StorageWork, Written, go_on
from diloco.store.base import Store
from diloco.store.metered import MeteredStore
from diloco.training.checkpoint import Restored, restored
from diloco.training.model_check import check_model
from diloco.training.replica_state import ReplicaState, StateWriter, is_residual


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
                self._storage.prefix, self._storage.check = b"", go_on

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
        unread = {name for name in unread if not is_residual(name)}  # ranks have slices of these
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
