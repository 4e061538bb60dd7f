"""Payload format: a small JSON header, then raw tensor bytes. Nothing is ever unpickled (I7).

::

    8 bytes   magic "ARCHIPL1"
    4 bytes   length of the header, little-endian
    header    JSON, padded with spaces so that the body starts on a 64-byte boundary
    body      codec output, cut into blocks of BLOCK_BYTES; the header lists a crc32 of each

The sha256 of everything before the body is the payload's *digest*: through the block checksums it
pins every byte, and costs nothing for large payloads. Blocks let a reader verify a byte range.

Errors: :class:`BadPayload` says what was expected and found.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from diloco.codec import get_codec

MAGIC = b"ARCHIPL1"
BLOCK_BYTES = 4 * 2**20
_ALIGN = 64
_PREFIX = len(MAGIC) + 4


class BadPayload(ValueError):
    """A payload is truncated, damaged, or not the one the plan names."""


@dataclass(frozen=True, kw_only=True)
class PayloadInfo:
    """Who made a payload and what it holds."""

    round: int
    fragment: int
    replica: int
    incarnation: str
    codec: str
    numel: int


@dataclass(frozen=True, kw_only=True)
class Payload:
    """A packed payload. ``data`` is the whole object."""

    data: bytearray
    digest: str


def pack(info: PayloadInfo, body: Tensor) -> Payload:
    """Pack ``body`` (1-d uint8, any device) into one object."""
    raw = body.cpu().numpy().data.cast("B")
    crcs = [
        zlib.crc32(raw[start : start + BLOCK_BYTES]) for start in range(0, len(raw), BLOCK_BYTES)
    ]
    header = json.dumps({**asdict(info), "body_bytes": len(raw), "crc32": crcs}).encode()
    header += b" " * (-(_PREFIX + len(header)) % _ALIGN)
    head = MAGIC + struct.pack("<I", len(header)) + header
    data = bytearray(len(head) + len(raw))
    data[: len(head)] = head
    data[len(head) :] = raw
    return Payload(data=data, digest=hashlib.sha256(head).hexdigest())


def unpack(data: bytes | bytearray, expected: PayloadInfo, *, digest: str) -> Tensor:
    """The body of a payload as a 1-d uint8 tensor, verified against what the plan says of it.

    The tensor shares memory with a copy of ``data``. Raises :class:`BadPayload`.
    """
    if len(data) < _PREFIX or data[: len(MAGIC)] != MAGIC:
        raise BadPayload(
            f"expected a payload that starts with {MAGIC!r}, found {bytes(data[:8])!r}"
        )
    (length,) = struct.unpack_from("<I", data, len(MAGIC))
    start = _PREFIX + length
    if len(data) < start:
        raise BadPayload(f"expected a header of {length} bytes, found {len(data) - _PREFIX}")
    found_digest = hashlib.sha256(data[:start]).hexdigest()
    if found_digest != digest:
        raise BadPayload(f"expected digest {digest}, found {found_digest}")
    header = json.loads(bytes(data[_PREFIX:start]))
    for name, value in asdict(expected).items():
        if header.get(name) != value:
            raise BadPayload(f"expected {name} {value!r}, found {header.get(name)!r}")
    size = get_codec(expected.codec).encoded_bytes(expected.numel)
    body = memoryview(bytearray(data) if isinstance(data, bytes) else data)[start:]
    if header.get("body_bytes") != size or len(body) != size:
        raise BadPayload(
            f"expected a body of {size} bytes, found {len(body)} "
            f"(the header says {header.get('body_bytes')})"
        )
    for index, crc in enumerate(header["crc32"]):
        block = body[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
        if zlib.crc32(block) != crc:
            raise BadPayload(f"expected crc32 {crc:#010x} in block {index}, found another")
    return torch.frombuffer(body, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
