"""Forks a group: copies a checkpoint of another group to checkpoint 0 of a new one.

Replicas start from the manifest of checkpoint 0, whichever process wrote it, so nothing else is
needed: no torch, and no memory for the whole model. Round, tokens and the number of committed
rounds start at 0: learning-rate schedule, limits and data are those of the new group. Weights are
matched by tensor name, so the new group can divide the model into other fragments. The outer
optimizer's state is one vector in the order of the fragments, so it can be copied only between
equal fragments.

Errors: :class:`ForkError` if the checkpoint no longer exists, is damaged, or does not match the
settings; :class:`~diloco.store.base.StoreError` of either store.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

from diloco.protocol import keys
from diloco.protocol.object_digest import ObjectDigest, digest_of
from diloco.protocol.pieces import read_range
from diloco.protocol.records import BadRecord, CheckpointManifest, StoredObject
from diloco.protocol.settings import GroupSettings
from diloco.store.base import PART_BYTES, MissingKey, Store

HEADER_LIMIT = 100_000_000
"""Bytes; the limit of the safetensors library for a header."""
COUNT = "committed_total"
"""Name of the int64 tensor in the outer state that counts committed rounds
(:mod:`diloco.training.checkpoint`)."""


class ForkError(ValueError):
    """A checkpoint cannot start another group; the message gives the reason."""


def read_manifest(source: Store, round: int) -> CheckpointManifest:
    """Read the manifest of the checkpoint of ``round``. Raises :class:`ForkError` if there is
    none, or if its objects were deleted."""
    try:
        manifest = CheckpointManifest.read(source, keys.checkpoint_manifest(round))
        source.get_range(manifest.weights.key, 0, 1)
    except MissingKey as error:
        raise ForkError(
            f"expected a checkpoint of round {round} under {source.uri}, found no {error}: the "
            "newest two are kept"
        ) from None
    except BadRecord as error:
        raise ForkError(f"checkpoint of round {round}: {error}") from error
    return manifest


def fork_checkpoint(
    source: Store,
    round: int,
    into: Store,
    *,
    theirs: GroupSettings,
    ours: GroupSettings,
    outer: bool,
    wall_s: float,
) -> CheckpointManifest:
    """Copy the checkpoint of ``round`` in ``source`` to checkpoint 0 of ``into``, whose group must
    not have replicas yet.

    ``theirs`` are the settings of the source group, ``ours`` those of the new one. ``outer`` copies
    the outer optimizer's state too. Idempotent.
    """
    manifest = read_manifest(source, round)
    same_fragments = (theirs.num_fragments, theirs.fragment_pattern) == (
        ours.num_fragments,
        ours.fragment_pattern,
    )
    if outer and not same_fragments:
        raise ForkError(
            f"the outer optimizer's state: expected {theirs.num_fragments} fragments "
            f"({theirs.fragment_pattern}), found {ours.num_fragments} ({ours.fragment_pattern})"
        )
    if (theirs.frozen, ours.frozen) == ("local", "equal"):
        raise ForkError(
            "frozen: expected 'local' as in the source, whose checkpoints have no digests of "
            "frozen parameters to compare replicas with, found 'equal'"
        )
    folder = keys.checkpoint_dir(0, manifest.writer.replica, manifest.writer.incarnation)
    outer_copy = None
    if outer and manifest.outer is not None:
        patch = _zeroed_count(source, manifest.outer)
        outer_copy = _copy(source, manifest.outer, into, f"{folder}outer.safetensors", patch)
    copy = CheckpointManifest(
        round=0,
        writer=manifest.writer,
        model_hash=manifest.model_hash,
        base_rounds=(0,) * ours.num_fragments,
        tensors=manifest.tensors,
        weights_digest=manifest.weights_digest if same_fragments else "",
        weights=_copy(source, manifest.weights, into, f"{folder}weights.safetensors"),
        outer=outer_copy,
        tokens_total=0,
        wall_s=wall_s,
        frozen=manifest.frozen,
    )
    into.create(keys.checkpoint_manifest(0), copy.to_bytes())
    return copy


def _zeroed_count(source: Store, stored: StoredObject) -> tuple[int, bytes]:
    """Return the offset of the committed-round count in the outer state, and the bytes of a zero.

    Format (https://huggingface.co/docs/safetensors): the header's length as eight little-endian
    bytes, a JSON header with each tensor's offsets relative to the end of the header, then the
    tensors.
    """
    [length] = struct.unpack("<Q", read_range(source, stored, 0, 8))
    if length > min(HEADER_LIMIT, stored.size_bytes):
        raise ForkError(f"{stored.key}: expected safetensors, found a header of {length} bytes")
    try:
        header = json.loads(read_range(source, stored, 8, length))
        start, end = header[COUNT]["data_offsets"]
        if header[COUNT]["dtype"] != "I64" or end - start != 8:
            raise ValueError(f"{COUNT} is {header[COUNT]}")
    except (ValueError, KeyError, TypeError) as error:
        raise ForkError(f"{stored.key}: expected safetensors with {COUNT}: {error}") from error
    return 8 + length + int(start), bytes(8)


def _copy(
    source: Store,
    stored: StoredObject,
    into: Store,
    key: str,
    patch: tuple[int, bytes] = (0, b""),
) -> StoredObject:
    """Copy an object part by part with ``patch`` (offset, bytes) applied, and describe the copy,
    which is one object even if the source has several pieces.

    The source is compared with its manifest's digest before any manifest names the copy.
    """
    sizes = stored.pieces or ()
    read, written = ObjectDigest(pieces=sizes), ObjectDigest(sha256=False)
    at, data = patch

    def parts() -> Iterator[bytes]:
        nonlocal read, written
        read, written = ObjectDigest(pieces=sizes), ObjectDigest(sha256=False)
        for start in range(0, stored.size_bytes, PART_BYTES):
            part = read_range(source, stored, start, PART_BYTES)
            read.update(part)
            part = _patched(part, start, at, data)
            written.update(part)
            yield part

    try:
        into.put_stream(key, parts, size_bytes=stored.size_bytes)
    except MissingKey as error:
        raise ForkError(f"{error} was deleted while it was read") from None
    if not read.matches(stored.digest):
        into.delete([key])
        raise ForkError(
            f"{stored.key}: expected the digest {stored.digest}, found {digest_of(read.checksums)}"
        )
    return StoredObject(key=key, size_bytes=stored.size_bytes, checksums=written.checksums)


def _patched(part: bytes, start: int, at: int, data: bytes) -> bytes:
    """Return ``part``, which begins at offset ``start``, with ``data`` written at offset ``at``."""
    low, high = max(at, start), min(at + len(data), start + len(part))
    if low >= high:
        return part
    return part[: low - start] + data[low - at : high - at] + part[high - start :]
