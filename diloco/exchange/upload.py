"""Uploading one contribution's payload, and checking what the store has of it.

A replica sums its own contribution from memory, so only the others would notice that its object is
damaged, perhaps after it has committed the round. Therefore it reads the object back before any
record names it: whole up to a limit, and of a larger one so many bytes, of another part in each
round. ``DILOCO_VERIFY_UPLOAD_BYTES`` changes the limit; 0 turns the check off.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

from diloco.codecs import Codec
from diloco.exchange.payload import BadPayload, Packing, check_part, header
from diloco.protocol.blocks import HEADER_BYTES, Span, block_elements, part_spans
from diloco.store.base import MissingKey, Store

log = logging.getLogger(__name__)

VERIFY_UPLOAD_BYTES = "DILOCO_VERIFY_UPLOAD_BYTES"
DEFAULT_BYTES = 64 * 2**20
UPLOADS = 3
"""How often a payload that the store has damaged is uploaded."""


def bytes_to_verify(environment: Mapping[str, str] = os.environ) -> int:
    """How much of each payload is read back. Raises :class:`ValueError` for what is no number."""
    text = environment.get(VERIFY_UPLOAD_BYTES, "")
    if not text:
        return DEFAULT_BYTES
    if not text.isdecimal():
        raise ValueError(f"{VERIFY_UPLOAD_BYTES}: expected a number of bytes, found {text!r}")
    return int(text)


def upload(
    store: Store, key: str, make: Callable[[], Packing], codec: Codec, *, verify_bytes: int
) -> tuple[Packing, str]:
    """Store a payload; returns it and, if no upload of :data:`UPLOADS` arrived as it was sent,
    what is wrong with the last one."""
    wrong = ""
    for _ in range(UPLOADS):
        packing = make()
        store.put_stream(key, packing.parts)
        wrong = damage_of(store, key, packing, codec, verify_bytes=verify_bytes)
        if not wrong:
            break
        log.warning("%s was damaged on its way (%s); it is uploaded again", key, wrong)
    return packing, wrong


def damage_of(store: Store, key: str, packing: Packing, codec: Codec, *, verify_bytes: int) -> str:
    """What is wrong with the object that ``packing`` was stored as, '' if nothing was found.

    One damaged read proves nothing, so the part is read once more.
    """
    info = packing.info
    block = block_elements(info.numel)
    parts = part_spans(
        Span(0, info.numel), block=block, block_bytes=codec.encoded_bytes(block)
    )  # fmt: skip
    first, read = info.round % max(1, len(parts)), 0
    for part in parts[first:] + parts[:first]:
        size_bytes = codec.encoded_bytes(part.numel)
        if (read and read + size_bytes > verify_bytes) or not verify_bytes:
            break
        read += size_bytes
        wrong = _wrong(store, key, packing, codec, part) and _wrong(
            store, key, packing, codec, part
        )
        if wrong:
            return wrong
    return ""


def _wrong(store: Store, key: str, packing: Packing, codec: Codec, part: Span) -> str:
    """The header lies before the first part and is read with it."""
    info = packing.info
    before = HEADER_BYTES if part.start == 0 else 0
    start = HEADER_BYTES + codec.encoded_bytes(part.start) - before
    size_bytes = codec.encoded_bytes(part.numel) + before
    try:
        data = memoryview(store.get_range(key, start, size_bytes))
    except MissingKey:
        return "expected the object, found none"
    if before and bytes(data[:before]) != header(info):
        return "expected its header, found another"
    try:
        check_part(
            data[before:], part, codec, numel=info.numel, checksums=packing.checksums
        )  # fmt: skip
    except BadPayload as error:
        return str(error)
    return ""
