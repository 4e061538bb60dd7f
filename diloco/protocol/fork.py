"""A group that begins with another group's checkpoint: its objects become this one's checkpoint 0.

Replicas take checkpoint 0 from its manifest, whoever wrote it, so nothing else is needed, no torch
and no room for the whole model in memory. Round, tokens and the number of committed rounds begin at
0 again: learning-rate schedule, limits and data are the new group's own. Weights are taken by the
names of their tensors, so the new group may cut the model into other fragments; the outer
optimizer's state is one vector in the order of the fragments, so with it they must be the same.

Errors: :class:`CannotPlant` when the checkpoint is not there any more, is damaged, or does not go
with the settings; :class:`~diloco.store.base.StoreError` of either store.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator

from diloco.protocol import keys
from diloco.protocol.records import BadRecord, CheckpointManifest, StoredObject
from diloco.protocol.settings import GroupSettings
from diloco.store.base import MissingKey, Store

PART_BYTES = 16 * 2**20
HEADER_LIMIT = 100_000_000
"""Bytes; what the safetensors library reads of a header at most."""
COUNT = "committed_total"
"""The tensor of the outer state that counts committed rounds, int64
(:mod:`diloco.training.checkpoint`)."""


class CannotPlant(ValueError):
    """A checkpoint cannot begin another group; the message says why."""


def read_manifest(source: Store, round: int) -> CheckpointManifest:
    """Raises :class:`CannotPlant` where that round has no checkpoint, or its objects are swept."""
    try:
        manifest = CheckpointManifest.read(source, keys.checkpoint_manifest(round))
        source.get_range(manifest.weights.key, 0, 1)
    except MissingKey as error:
        raise CannotPlant(
            f"expected a checkpoint of round {round} under {source.uri}, found no {error}: the "
            "newest two are kept"
        ) from None
    except BadRecord as error:
        raise CannotPlant(f"checkpoint of round {round}: {error}") from error
    return manifest


def plant(
    source: Store,
    round: int,
    into: Store,
    *,
    theirs: GroupSettings,
    ours: GroupSettings,
    outer: bool,
    wall_s: float,
) -> CheckpointManifest:
    """Make the checkpoint of ``round`` in ``source`` checkpoint 0 of ``into``, whose group must
    have no replicas yet. ``outer``: with the outer optimizer's state. Done twice it changes
    nothing."""
    manifest = read_manifest(source, round)
    same = (theirs.num_fragments, theirs.fragment_pattern) == (
        ours.num_fragments,
        ours.fragment_pattern,
    )
    if outer and not same:
        raise CannotPlant(
            f"the outer optimizer's state goes with {theirs.num_fragments} fragments "
            f"({theirs.fragment_pattern}), found {ours.num_fragments} ({ours.fragment_pattern})"
        )
    folder = keys.checkpoint_dir(0, manifest.writer.replica, manifest.writer.incarnation)
    momentum = None
    if outer and manifest.outer is not None:
        patch = _zeroed_count(source, manifest.outer)
        momentum = _copy(source, manifest.outer, into, f"{folder}outer.safetensors", patch)
    planted = CheckpointManifest(
        round=0,
        writer=manifest.writer,
        model_hash=manifest.model_hash,
        base_rounds=(0,) * ours.num_fragments,
        tensors=manifest.tensors,
        weights_digest=manifest.weights_digest if same else "",
        weights=_copy(source, manifest.weights, into, f"{folder}weights.safetensors"),
        outer=momentum,
        tokens_total=0,
        wall_s=wall_s,
    )
    into.create(keys.checkpoint_manifest(0), planted.to_bytes())
    return planted


def _zeroed_count(source: Store, described: StoredObject) -> tuple[int, bytes]:
    """Where in the object the count of committed rounds lies, and what shall stand there.

    https://huggingface.co/docs/safetensors: eight bytes of length, little-endian, a JSON header of
    that length with each tensor's offsets behind the header, then the tensors.
    """
    [length] = struct.unpack("<Q", source.get_range(described.key, 0, 8))
    if length > min(HEADER_LIMIT, described.size_bytes):
        raise CannotPlant(
            f"{described.key}: expected safetensors, found a header of {length} bytes"
        )
    try:
        header = json.loads(source.get_range(described.key, 8, length))
        start, end = header[COUNT]["data_offsets"]
        if header[COUNT]["dtype"] != "I64" or end - start != 8:
            raise ValueError(f"{COUNT} is {header[COUNT]}")
    except (ValueError, KeyError, TypeError) as error:
        raise CannotPlant(f"{described.key}: expected safetensors with {COUNT}: {error}") from error
    return 8 + length + int(start), bytes(8)


def _copy(
    source: Store,
    described: StoredObject,
    into: Store,
    key: str,
    patch: tuple[int, bytes] = (0, b""),
) -> StoredObject:
    """Copy part by part, with ``patch`` laid over it, and describe the copy.

    What was read is compared with the manifest's digest before the copy is named by anything.
    """
    read, written = hashlib.sha256(), hashlib.sha256()
    at, data = patch

    def parts() -> Iterator[bytes]:
        nonlocal read, written
        read, written = hashlib.sha256(), hashlib.sha256()
        for start in range(0, described.size_bytes, PART_BYTES):
            part = source.get_range(described.key, start, PART_BYTES)
            read.update(part)
            part = _laid_over(part, start, at, data)
            written.update(part)
            yield part

    try:
        into.put_stream(key, parts)
    except MissingKey as error:
        raise CannotPlant(f"{error} was swept while it was read") from None
    if read.hexdigest() != described.sha256:
        into.delete([key])
        raise CannotPlant(
            f"{described.key}: expected sha256 {described.sha256}, found {read.hexdigest()}"
        )
    return StoredObject(key=key, size_bytes=described.size_bytes, sha256=written.hexdigest())


def _laid_over(part: bytes, start: int, at: int, data: bytes) -> bytes:
    low, high = max(at, start), min(at + len(data), start + len(part))
    if low >= high:
        return part
    return part[: low - start] + data[low - at : high - at] + part[high - start :]
