"""Serialise the tensors of a member's allreduce calls as one object, without pickle (I7).

::

    8 bytes   magic "ARCHIMG1"
    4 bytes   length of the header
    header    JSON of a :class:`Batch`
    body      the tensors of the calls, concatenated: raw, or int8 (:mod:`diloco.codecs`)

Errors: :class:`~diloco.exchange.payload.BadPayload` for a damaged or unexpected object.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor

from diloco.codecs import get_codec
from diloco.exchange.checked_blocks import BadPayload, checksum, raw
from diloco.protocol.records import Identity

MAGIC = b"ARCHIMG1"
_PREFIX = struct.Struct("<8sI")
_DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}
QUANTISED = get_codec("int8")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The properties of a call on which all members must agree. ``codec`` is '' for raw bytes."""

    dtype: str
    shape: tuple[int, ...]
    op: str
    codec: str

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def size_bytes(self) -> int:
        if self.codec:
            return QUANTISED.encoded_bytes(self.numel)
        return self.numel * _DTYPES[self.dtype].itemsize


def spec_of(tensor: Tensor, *, op: str, quantise: bool) -> Spec:
    """Return the spec of a call. Raises :class:`ValueError` for an unsupported dtype."""
    if str(tensor.dtype) not in _DTYPES:
        raise ValueError(f"dtype: expected one of {sorted(_DTYPES)}, found {tensor.dtype}")
    codec = "int8" if quantise and tensor.is_floating_point() else ""
    return Spec(dtype=str(tensor.dtype), shape=tuple(tensor.shape), op=op, codec=codec)


def encode(tensor: Tensor, spec: Spec) -> memoryview:
    """Return a copy of the bytes of ``tensor`` (any device and strides)."""
    flat = tensor.detach().reshape(-1)
    if spec.codec:
        return raw(QUANTISED.encode(flat.float()).cpu())
    return raw(flat.cpu().contiguous().clone().view(torch.uint8))


def decode(body: bytes | memoryview, spec: Spec) -> Tensor:
    """Return the tensor, (numel,) on the CPU: fp32 if it was quantised, else the call's dtype."""
    if not spec.numel:
        return torch.empty(0, dtype=torch.float32 if spec.codec else _DTYPES[spec.dtype])
    data = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    if spec.codec:
        return QUANTISED.decode(data, spec.numel)
    return data.view(_DTYPES[spec.dtype])


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The header: calls of one member, numbered from ``first``."""

    n: int
    member: int
    incarnation: str
    batch: int
    first: int
    specs: tuple[Spec, ...]
    checksum: str


def pack(
    identity: Identity,
    calls: Sequence[tuple[Spec, memoryview]],
    *,
    n: int,
    batch: int,
    first: int,
) -> bytes:
    """Serialise the calls of batch ``batch`` in round ``n``, numbered from ``first``."""
    body = b"".join(bytes(data) for _, data in calls)
    header = Batch(
        n=n,
        member=identity.replica,
        incarnation=identity.incarnation,
        batch=batch,
        first=first,
        specs=tuple(spec for spec, _ in calls),
        checksum=checksum(body),
    )
    text = json.dumps(asdict(header), separators=(",", ":")).encode()
    return _PREFIX.pack(MAGIC, len(text)) + text + body


@cache
def largest_payload() -> int:
    """Return the maximum bytes of a batch that is read: half of this machine's memory. A member can
    have made more calls than this one, so there is no smaller bound."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _is_valid(spec: Spec) -> bool:
    return spec.dtype in _DTYPES and spec.codec in ("", "int8") and min((0, *spec.shape)) >= 0


def unpack(
    data: bytes, identity: Identity, *, n: int, batch: int, first: int
) -> list[tuple[Spec, memoryview]]:
    """Parse the calls of the expected batch. Raises :class:`BadPayload`."""
    label = f"batch {batch} of member {identity.replica} in round {n}"
    try:
        magic, length = _PREFIX.unpack_from(data)
        values = json.loads(data[_PREFIX.size : _PREFIX.size + length])
        specs = tuple(
            Spec(
                dtype=str(spec["dtype"]),
                shape=tuple(int(size) for size in spec["shape"]),
                op=str(spec["op"]),
                codec=str(spec["codec"]),
            )
            for spec in values.pop("specs")
        )
        header = Batch(specs=specs, **values)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadPayload(f"{label}: expected a payload, found {data[:16]!r}...") from None
    place = (header.n, header.member, header.incarnation, header.batch, header.first)
    expected = (n, identity.replica, identity.incarnation, batch, first)
    if magic != MAGIC or place != expected:
        raise BadPayload(f"{label}: expected {expected}, found {place}")
    if not all(map(_is_valid, specs)):
        raise BadPayload(f"{label}: expected tensors, found {specs}")
    body = memoryview(data)[_PREFIX.size + length :]
    if (
        not specs
        or len(body) != sum(spec.size_bytes for spec in specs)
        or checksum(body) != header.checksum
    ):
        raise BadPayload(f"{label}: expected checksum {header.checksum}, found a damaged body")
    calls, offset = [], 0
    for spec in specs:
        calls.append((spec, body[offset : offset + spec.size_bytes]))
        offset += spec.size_bytes
    return calls
