"""The weights of a round: of its checkpoint, or of the final export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from diloco.model import named_parameters
from diloco.protocol.records import StoredObject
from diloco.store.base import MissingKey, Store
from diloco.training.checkpoint import newest_manifest, read_manifest
from diloco.training.final_result import read_final
from diloco.training.stored_objects import load_tensors


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Names the global weights after ``round``."""

    round: int
    final: bool
    stored: StoredObject

    def load(self, store: Store) -> dict[str, Tensor]:
        """Read and verify the weights. Raises :class:`ValueError` if they were deleted, and
        :class:`~diloco.errors.DamagedObject`."""
        try:
            return load_tensors(store, self.stored)
        except MissingKey:
            raise ValueError(
                f"expected the weights of round {self.round}, found none at {self.stored.key}: "
                "only those of the newest two checkpoints are kept"
            ) from None


def find_weights(store: Store, round: int | None = None) -> Weights:
    """Find the weights of ``round``, by default the final ones or those of the newest checkpoint.

    Raises :class:`ValueError` if there are none.
    """
    if round is not None:
        try:
            manifest = read_manifest(store, round)
        except MissingKey:
            pass
        else:
            return Weights(round=round, final=False, stored=manifest.weights)
    final = read_final(store)
    if final is not None and round in (None, final.round):
        return Weights(round=final.round, final=True, stored=final.weights)
    newest = newest_manifest(store) if round is None else None
    if newest is None:
        wanted = "a checkpoint or final weights" if round is None else f"weights of round {round}"
        raise ValueError(f"expected {wanted} at {store.uri}, found none yet")
    return Weights(round=newest.round, final=False, stored=newest.weights)


def load_into(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load all weights. A checkpoint has only trained tensors, a final export also has buffers.

    Raises :class:`ValueError` for a tensor that the model lacks, needs or has in another shape.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in named_parameters.state(model)}
    actual = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    buffers = {name for name, _ in model.named_buffers()}
    for name in sorted((expected.keys() - buffers) | actual.keys()):
        if expected.get(name) != actual.get(name):
            raise ValueError(
                f"weights: expected {name} of shape {expected.get(name)}, found {actual.get(name)}"
            )
    model.load_state_dict(dict(tensors), strict=False)  # tied weights have one name
