"""Compare the model of a replica with the group's, which a checkpoint's manifest describes."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import zip_longest

from diloco.errors import DamagedObject, ModelMismatch
from diloco.model.comparison import described, first_difference
from diloco.model.flat_parameters import Layout
from diloco.protocol.parsing import abridged
from diloco.protocol.records import CheckpointManifest, FrozenEntry

log = logging.getLogger(__name__)
Entries = tuple[FrozenEntry, ...]


def check_model(manifest: CheckpointManifest, layout: Layout) -> None:
    """Raise :class:`ModelMismatch` for other trained tensors or other frozen parameters than those
    of the writer, and :class:`DamagedObject` for another number of fragments, which is a setting of
    the group.

    Afterwards ``layout`` has the manifest's digests of values that are not in memory here, so that
    the next checkpoint of this replica records them, too.
    """
    if manifest.model_hash != layout.model_hash:
        raise ModelMismatch(_other_model(manifest, layout))
    fragments, bases = layout.table.fragments, manifest.base_rounds
    if len(bases) != fragments or min(bases) < 0 or max(bases) > manifest.round:
        raise DamagedObject(
            f"the checkpoint of round {manifest.round}: expected base rounds of {fragments} "
            f"fragments, each up to {manifest.round}, found {abridged(bases)}"
        )
    if manifest.frozen is None:
        if layout.frozen:
            log.warning(
                "the checkpoint of round %d, of an earlier version, does not describe frozen "
                "parameters: those of this replica are not compared",
                manifest.round,
            )
        return
    expected = _with_digests_of(layout.frozen, manifest.frozen)
    found = _with_digests_of(manifest.frozen, layout.frozen)
    if expected != found:
        raise ModelMismatch(_other_base(manifest, expected, found, layout.compares_frozen))
    if layout.compares_frozen:
        layout.frozen = tuple(
            own if own.digest else known
            for own, known in zip(layout.frozen, manifest.frozen, strict=True)
        )


def _with_digests_of(others: Entries, entries: Entries) -> Entries:
    """Return ``entries`` without the digests that their counterparts in ``others`` do not have."""
    return tuple(
        entry if other is None or other.digest else replace(entry, digest="")
        for entry, other in zip_longest(entries, others)
        if entry is not None
    )


def _other_base(
    manifest: CheckpointManifest, expected: Entries, found: Entries, compares_values: bool
) -> str:
    difference = first_difference(described((), expected), described((), found))
    writer = f"replica {manifest.writer.replica}"
    if compares_values:
        remedy = (
            f"Load the base model of the group, in the same revision and precision as {writer}. If "
            "they differ on purpose, e.g. those of a teacher, create another group with the "
            "setting frozen='local'"
        )
    else:
        remedy = (
            "Their values can differ in this group, but not their names, shapes and dtypes. Build "
            f"the model of {writer}, or keep the part that differs outside of the model"
        )
    return (
        f"expected the frozen parameters of the group's model, found others: {difference}. "
        f"Replicas do not exchange them. {remedy}"
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
