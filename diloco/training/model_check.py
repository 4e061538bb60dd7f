"""Compare the model of a replica with the group's, which a checkpoint's manifest describes."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

from diloco.errors import ModelMismatch
from diloco.model.comparison import described, first_difference
from diloco.model.flat_parameters import Layout
from diloco.protocol.records import CheckpointManifest, FrozenEntry


def check_model(manifest: CheckpointManifest, layout: Layout) -> None:
    """Raise :class:`ModelMismatch` for other trained tensors or other frozen parameters than those
    of the writer."""
    if manifest.model_hash != layout.model_hash:
        raise ModelMismatch(_other_model(manifest, layout))
    expected = manifest.frozen
    if expected is None or not layout.compares_frozen:
        return  # a group without frozen parameters, or of an earlier version, has recorded none
    if not _equal(expected, layout.frozen):
        raise ModelMismatch(_other_base(manifest, expected, layout))


def _equal(expected: tuple[FrozenEntry, ...], found: tuple[FrozenEntry, ...]) -> bool:
    """Compare frozen parameters; of those whose values were not in memory name and shape only."""
    return all(
        one is not None
        and other is not None
        and (one == other or (not (one.digest and other.digest) and _unread(one) == _unread(other)))
        for one, other in zip_longest(expected, found)
    )


def _unread(entry: FrozenEntry) -> FrozenEntry:
    return replace(entry, digest="")


def _other_base(
    manifest: CheckpointManifest, expected: tuple[FrozenEntry, ...], layout: Layout
) -> str:
    difference = first_difference(described((), expected), described((), layout.frozen))
    return (
        f"expected the frozen parameters of the group's model, found others: {difference}. "
        "Replicas do not exchange them. Load the base model of the group, in the same revision and "
        f"precision as replica {manifest.writer.replica}. If they differ on purpose, e.g. those of "
        "a teacher, enter frozen='local' in join on all replicas"
    )


def _other_model(manifest: CheckpointManifest, layout: Layout) -> str:
    remedy = ". Build the group's model, or enter another URI for a new group"
    if manifest.round == 0:
        remedy = (
            f". Replica {manifest.writer.replica} joined first and defined the group's model. If "
            "that model is wrong and no round is committed, stop the replicas and run "
            "python -m diloco.init URI --replace-model"
        )
    fingerprints = (
        f"expected the group's model with fingerprint {manifest.model_hash}, found "
        f"{layout.model_hash}: "
    )
    difference = first_difference(described(manifest.tensors), described(layout.tensors))
    return f"{fingerprints}{difference or 'equal parameters, but different embeddings'}{remedy}"
