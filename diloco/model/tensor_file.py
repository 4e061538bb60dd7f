"""Tensors as the parts of a safetensors object, which is never in memory as a whole.

Format (https://huggingface.co/docs/safetensors): the header's length as eight little-endian bytes,
a JSON header with dtype, shape and offsets of each tensor, then the tensors without gaps. Never
pickle (I7).
"""

from __future__ import annotations

import json
import math
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diloco.protocol.parsing import abridged, parse_json
from diloco.store.base import PART_BYTES

HEADER_LIMIT = 100_000_000
"""Maximum size of a header in bytes, the limit of the safetensors library."""
CONTAINERS = 1_000_000
"""Maximum number of objects and lists in a header, three per tensor."""
DIMENSIONS = 64
"""Maximum dimensions of a tensor, as in torch's operations."""
LENGTH_BYTES = 8
DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.uint32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of an object; ``start`` and ``stop`` are the offsets of its bytes in the
    object."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The bytes of a tensor of this shape and dtype."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Return an uninitialised tensor of this shape and dtype on the CPU."""
        return torch.empty(self.shape, dtype=self.dtype)


class TensorWriter:
    """Tensors, on any device, as an object of ``size_bytes``.

    The tensors must not change until the parts are written, unless :meth:`copy` was called. They
    can share memory: each is written in full. Raises :class:`TypeError` for a tensor that
    safetensors cannot hold.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        check_storable(tensors)
        self._tensors = in_order(tensors)
        self._header = header_of(self._tensors)
        body_bytes = sum(tensor.nbytes for tensor in self._tensors.values())
        self.size_bytes = len(self._header) + body_bytes
        self._copied: list[memoryview] | None = None

    def copy(self) -> None:
        """Copy the tensors now, as parts; they can change afterwards. Releases each tensor after
        its copy, so that a tensor without another reference costs no additional memory.

        The parts are slices of one allocation: the C library would keep the memory of many small
        ones after they are freed.
        """
        if self._copied is None:
            whole = torch.empty(self.size_bytes, dtype=torch.uint8)
            parts = iter(torch.split(whole, PART_BYTES))
            released = self._released()
            self._copied = list(
                packed(self._header, released, self.size_bytes, lambda left: next(parts))
            )

    def parts(self) -> Iterator[memoryview]:
        """Yield the object in parts of :data:`~diloco.store.base.PART_BYTES`, each in separate
        memory. Can be called again."""
        if self._copied is None:
            return packed(self._header, self._tensors.values(), self.size_bytes)
        return iter(self._copied)

    def _released(self) -> Iterator[Tensor]:
        while self._tensors:
            yield self._tensors.pop(next(iter(self._tensors)))


@torch.no_grad()
def packed(
    prefix: bytes,
    tensors: Iterable[Tensor],
    size_bytes: int,
    new_part: Callable[[int], Tensor] | None = None,
) -> Iterator[memoryview]:
    """Yield ``size_bytes`` bytes, ``prefix`` and then those of the tensors, in parts of
    :data:`~diloco.store.base.PART_BYTES`; ``new_part`` returns the memory of one, at most the
    number of bytes that are left."""
    new_part = new_part or _new_part
    left = size_bytes
    part, filled = new_part(left), 0
    for tensor in _with_prefix(prefix, tensors):
        flat, copied = tensor.detach().reshape(-1), 0
        size = flat.element_size()
        while copied < flat.numel():
            count = min(flat.numel() - copied, (part.numel() - filled) // size)
            where = part[filled : filled + count * size].view(flat.dtype)
            where.copy_(flat[copied : copied + count])
            copied, filled = copied + count, filled + count * size
            if filled == part.numel():
                yield memoryview(part.numpy())  # type: ignore[arg-type]
                left -= filled
                part, filled = new_part(left) if left else part[:0], 0
    assert left == 0, "the tensors differ from the header"


def _with_prefix(prefix: bytes, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    if prefix:
        yield torch.from_numpy(np.frombuffer(bytearray(prefix), dtype=np.uint8))
    yield from tensors


def _new_part(left: int) -> Tensor:
    return torch.empty(min(left, PART_BYTES), dtype=torch.uint8)


def check_storable(tensors: Mapping[str, Tensor]) -> None:
    """Raise :class:`TypeError` for a tensor that safetensors cannot hold."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
            raise TypeError(
                f"{name}: expected a dense tensor of {', '.join(_NAMES.values())}, found "
                f"{tensor.dtype}, {tensor.layout}"
            )


def in_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in the order of their object: the widest first, so that all are aligned."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def header_of(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the header of an object of tensors, which can be on the meta device; see
    :func:`in_order`."""
    fields, start = {}, 0
    for name, tensor in tensors.items():
        fields[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def header_bytes(start: bytes | bytearray, size_bytes: int) -> int:
    """Return the size of an object's header, its length field included, from the object's first
    bytes. Raises :class:`ValueError`."""
    if len(start) < LENGTH_BYTES:
        raise ValueError(f"expected a safetensors header, found {len(start)} bytes")
    (length,) = struct.unpack_from("<Q", start)
    if length > min(HEADER_LIMIT, size_bytes - LENGTH_BYTES):
        raise ValueError(f"expected a safetensors header, found one of {length} bytes")
    return LENGTH_BYTES + int(length)


def parse_header(header: bytes | bytearray, size_bytes: int) -> list[Entry]:
    """Return the tensors of an object of ``size_bytes``, in the order of their bytes, from its
    first :func:`header_bytes`. Raises :class:`ValueError` for anything that safetensors forbids."""
    fields = parse_json(bytes(header[LENGTH_BYTES:]), containers=CONTAINERS)
    if not isinstance(fields, dict):
        raise ValueError(f"expected a safetensors header, found {type(fields).__name__}")
    fields.pop("__metadata__", None)
    entries = [_entry(name, value, len(header)) for name, value in fields.items()]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    stop = len(header)
    for entry in entries:
        if entry.start != stop:
            raise ValueError(f"{entry.name}: expected offset {stop}, found {entry.start}")
        stop = entry.stop
    if stop != size_bytes:
        raise ValueError(f"expected {size_bytes} bytes of tensors, found {stop}")
    return entries


def _entry(name: str, value: Any, first: int) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
            entry = Entry(name, DTYPES.get(dtype, torch.uint8), tuple(shape), start, stop)
            are_sizes = all(type(size) is int and 0 <= size < 2**63 for size in shape)
            are_sizes = are_sizes and len(shape) <= DIMENSIONS
            if dtype in DTYPES and are_sizes and entry.nbytes == stop - start:
                return replace(entry, start=first + start, stop=first + stop)
    raise ValueError(f"expected a tensor of safetensors, found {abridged(value)}")


@dataclass(frozen=True)
class Window:
    """Elements of a tensor of an object, from ``first``, and the flat contiguous CPU tensor of the
    same dtype to read them into."""

    first: int
    into: Tensor


class Filling:
    """Copies parts of an object into the windows of its tensors, which are in the order of the
    object."""

    def __init__(self, wanted: Sequence[tuple[Entry, Sequence[Window]]]) -> None:
        self._windows = sorted(
            (
                (entry.start + window.first * entry.dtype.itemsize, _bytes_of(window.into))
                for entry, windows in wanted
                for window in windows
                if window.into.numel()
            ),
            key=lambda window: window[0],
        )
        self._starts = [start for start, _ in self._windows]

    def needs(self, start: int, stop: int) -> bool:
        """Return whether a window has a byte between these positions of the object."""
        return any(True for _ in self._inside(start, stop))

    def add(self, start: int, part: bytes | bytearray) -> None:
        """Copy the part from ``start`` into the windows that have some of it."""
        for first, into in self._inside(start, start + len(part)):
            low, high = max(start, first), min(start + len(part), first + len(into))
            source = np.frombuffer(part, dtype=np.uint8, count=high - low, offset=low - start)
            into[low - first : high - first] = source

    def _inside(self, start: int, stop: int) -> Iterator[tuple[int, Any]]:
        """Yield the windows with a byte between two positions. Windows do not overlap."""
        index = max(0, bisect_right(self._starts, start) - 1)
        while index < len(self._windows) and self._starts[index] < stop:
            first, into = self._windows[index]
            if first + len(into) > start:
                yield first, into
            index += 1


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.view(torch.uint8).numpy()
