"""Uploads a contribution's payload and verifies the stored object.

A replica sums its own contribution from memory, so without a check only other replicas would notice
a damaged object, perhaps after it has committed the round. It therefore reads the object back
before it reduces or commits the round: the whole object up to a limit, and of a larger one that
many bytes, another part in each round. ``DILOCO_VERIFY_UPLOAD_BYTES`` sets the limit; 0 disables
the check. The check takes the time of two requests, in which the record is written and the plan is
made. A damaged object is uploaded again meanwhile, with the same bytes, and readers of a damaged
block give its writer time for that.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable

from diloco.codecs import Codec
from diloco.exchange.checked_blocks import BadPayload
from diloco.exchange.payload import PayloadWriter
from diloco.protocol.blocks import Span, block_elements, part_spans, read_back_ranges
from diloco.protocol.parallel_reads import Range, read_parts
from diloco.store.base import MissingKey, Store

log = logging.getLogger(__name__)

VERIFY_UPLOAD_BYTES = "DILOCO_VERIFY_UPLOAD_BYTES"
DEFAULT_BYTES = 64 * 2**20
UPLOADS = 3
"""Attempts to upload a payload that the store damages."""


def bytes_to_verify() -> int:
    """Return the bytes of each payload to read back. Raises :class:`ValueError` for an invalid
    environment variable."""
    text = os.environ.get(VERIFY_UPLOAD_BYTES, "")
    if not text:
        return DEFAULT_BYTES
    if not text.isdecimal():
        raise ValueError(f"{VERIFY_UPLOAD_BYTES}: expected a number of bytes, found {text!r}")
    return int(text)


def upload(
    store: Store, key: str, make: Callable[[], PayloadWriter], codec: Codec, *, verify_bytes: int
) -> tuple[PayloadWriter, Callable[[], str]]:
    """Store a payload. Returns it with the function that checks the stored object.

    The function uploads a damaged object again, and returns a description of the damage if all
    :data:`UPLOADS` attempts arrived damaged, '' otherwise.
    """
    packing = make()
    store.put_stream(key, packing.parts, size_bytes=packing.size_bytes)

    def verify() -> str:
        written = packing
        for attempt in range(1, UPLOADS + 1):
            damage = damage_of(store, key, written, codec, verify_bytes=verify_bytes)
            if not damage or attempt == UPLOADS:
                return damage
            log.warning("%s was damaged in transfer (%s); uploading it again", key, damage)
            written = make()
            store.put_stream(key, written.parts, size_bytes=written.size_bytes)
        return damage

    return packing, verify


def damage_of(
    store: Store, key: str, packing: PayloadWriter, codec: Codec, *, verify_bytes: int
) -> str:
    """Return the damage of the stored object, '' if none was found.

    A part that fails is read once more, because a single read can be damaged in transfer.
    """
    parts = _verified_parts(packing, codec, verify_bytes)
    places = [_range_of(key, packing, part) for part in parts]
    divided = [read_back_ranges(length) for _, _, length in places]
    ranges = [
        (key, first + start, length)
        for (_, first, _), pieces in zip(places, divided, strict=True)
        for start, length in pieces
    ]
    try:
        with contextlib.closing(read_parts(store, ranges)) as stream:
            for part, where, pieces in zip(parts, places, divided, strict=True):
                data = b"".join(itertools.islice(stream, len(pieces)))
                if _part_damage(data, packing, part):
                    damage = _part_damage(store.get_range(*where), packing, part)
                    if damage:
                        return damage
    except MissingKey:
        return "expected the object, found none"
    return ""


def _verified_parts(packing: PayloadWriter, codec: Codec, verify_bytes: int) -> list[Span]:
    """Return the parts to read back: at least one and up to ``verify_bytes``, from another one on
    in each round; none if that is 0."""
    block = block_elements(packing.info.numel)
    parts = part_spans(packing.span, block=block, block_bytes=codec.encoded_bytes(block))
    first, read = packing.info.round % max(1, len(parts)), 0
    chosen: list[Span] = []
    for part in parts[first:] + parts[:first]:
        read += codec.encoded_bytes(part.numel)
        if (chosen and read > verify_bytes) or not verify_bytes:
            break
        chosen.append(part)
    return chosen


def _header_bytes(packing: PayloadWriter, part: Span) -> int:
    """Return the bytes of the header that are read with a part."""
    return 0 if part.start > packing.span.start else len(packing.header)


def _range_of(key: str, packing: PayloadWriter, part: Span) -> Range:
    """Return the place of a part. The header precedes the first part and is read with it."""
    header_bytes = _header_bytes(packing, part)
    before = packing.blocks.size_bytes(part.start - packing.span.start)
    start = len(packing.header) + before - header_bytes
    return key, start, packing.blocks.size_bytes(part.numel) + header_bytes


def _part_damage(content: bytes, packing: PayloadWriter, part: Span) -> str:
    """Return the damage of one part that was read back."""
    data, header_bytes = memoryview(content), _header_bytes(packing, part)
    if bytes(data[:header_bytes]) != packing.header[:header_bytes]:
        return "expected its header, found another"
    try:
        packing.blocks.check(data[header_bytes:], part)
    except BadPayload as error:
        return str(error)
    return ""
