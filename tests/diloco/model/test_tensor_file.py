"""Tensors as parts of safetensors objects: the same content as the library's, part by part."""

from __future__ import annotations

import json
import struct
import weakref
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from diloco.model import tensor_file
from diloco.model.tensor_file import (
    DTYPES,
    Entry,
    Filling,
    TensorWriter,
    Window,
    header_bytes,
    parse_header,
)

SMALL = 64


@pytest.fixture(params=[SMALL, tensor_file.PART_BYTES], ids=["small parts", "one part"])
def part_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(tensor_file, "PART_BYTES", request.param)
    return int(request.param)


def every_kind() -> dict[str, Tensor]:
    shared = torch.arange(40.0)
    kinds = {name: torch.ones(5).to(dtype) for name, dtype in DTYPES.items()}
    return {
        **kinds,
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "whole": shared,
        "shared": shared[3:9],
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    }


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def read(data: bytes, part_bytes: int) -> dict[str, Tensor]:
    """Read an object part by part."""
    entries = parse_header(data[: header_bytes(data, len(data))], len(data))
    targets = {entry: entry.empty() for entry in entries}
    fill(data, part_bytes, {entry: [Window(0, t.reshape(-1))] for entry, t in targets.items()})
    return {entry.name: tensor for entry, tensor in targets.items()}


def fill(data: bytes, part_bytes: int, windows: dict[Entry, list[Window]]) -> list[int]:
    """Copy the parts that the windows need; return the positions of the others."""
    filling, left_out = Filling(list(windows.items())), []
    for at in range(0, len(data), part_bytes):
        if filling.needs(at, min(at + part_bytes, len(data))):
            filling.add(at, data[at : at + part_bytes])
        else:
            left_out.append(at)
    return left_out


def test_the_library_reads_what_is_written(part_bytes: int) -> None:
    tensors = every_kind()
    writer = TensorWriter(tensors)
    for _ in range(2):  # as for another attempt of an upload
        parts = list(writer.parts())
        assert all(len(part) == part_bytes for part in parts[:-1])
        data = b"".join(parts)
        assert len(data) == writer.size_bytes
        check_equal(load_safetensors(data), tensors)


def test_what_the_library_writes_is_read(part_bytes: int) -> None:
    tensors = {name: tensor.contiguous().clone() for name, tensor in every_kind().items()}
    check_equal(read(save_safetensors(tensors, {"format": "pt"}), part_bytes), tensors)
    check_equal(read(b"".join(TensorWriter(tensors).parts()), part_bytes), tensors)


def test_a_copy_keeps_the_values_and_releases_the_tensors(part_bytes: int) -> None:
    live, temporary = torch.arange(50.0), torch.ones(9)
    expected = {"live": live.clone(), "temporary": temporary.clone()}
    writer = TensorWriter({"live": live, "temporary": temporary})
    reference = weakref.ref(temporary)
    del temporary
    writer.copy()
    live.zero_()
    assert reference() is None
    for _ in range(2):
        check_equal(load_safetensors(b"".join(writer.parts())), expected)


def test_an_object_can_be_read_in_place_and_in_part(part_bytes: int) -> None:
    tensors = {"a": torch.arange(30.0), "b": torch.arange(30), "c": torch.arange(5.0)}
    data = b"".join(TensorWriter(tensors).parts())
    vector = torch.zeros(35)
    views = {"a": vector[5:], "c": vector[:5]}
    entries = parse_header(data[: header_bytes(data, len(data))], len(data))
    fill(data, part_bytes, {e: [Window(0, views[e.name])] for e in entries if e.name in views})
    assert torch.equal(vector, torch.cat([tensors["c"], tensors["a"]]))


def test_some_elements_of_a_tensor_are_read(part_bytes: int) -> None:
    tensors = {"a": torch.arange(300.0), "b": torch.arange(30)}
    data = b"".join(TensorWriter(tensors).parts())
    a, b = torch.zeros(40), torch.zeros(5, dtype=torch.int64)
    entries = {e.name: e for e in parse_header(data[: header_bytes(data, len(data))], len(data))}
    windows = {entries["a"]: [Window(250, a[:20]), Window(3, a[20:])], entries["b"]: [Window(2, b)]}
    left_out = fill(data, part_bytes, windows)
    assert a.tolist() == [*range(250, 270), *range(3, 23)] and b.tolist() == [*range(2, 7)]
    assert (
        entries["a"].start + 100 * 4
        in {at for start in left_out for at in range(start, start + part_bytes)}
        or part_bytes > 400
    )


@pytest.mark.parametrize(
    "tensor", [torch.ones(2, dtype=torch.complex128), torch.ones(2, 2).to_sparse()]
)
def test_a_tensor_that_cannot_be_stored_is_refused(tensor: Tensor) -> None:
    with pytest.raises(TypeError, match="odd: expected a dense tensor"):
        TensorWriter({"odd": tensor})


def entry(**changed: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changed}


@pytest.mark.parametrize(
    "fields",
    [
        [],
        {"a": 1},
        {"a": entry(dtype="F33")},
        {"a": entry(shape=[3])},
        {"a": entry(shape=[-2, -1])},
        {"a": entry(shape=[2.0])},
        {"a": entry(shape=[2**62, 2**62])},
        {"a": entry(shape=[2, True])},
        {"a": entry(shape=[2] + 64 * [1])},
        {"a": entry(data_offsets=[0])},
        {"a": entry(data_offsets=[-8, 0])},
        {"a": entry(data_offsets=[4, 12])},
        {"a": entry(), "b": entry()},
        {"a": entry(shape=[1], data_offsets=[0, 4])},
    ],
)
def test_a_hostile_header_is_refused(fields: Any) -> None:
    text = json.dumps(fields).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(8)
    with pytest.raises(ValueError, match="expected"):
        parse_header(data[: header_bytes(data, len(data))], len(data))


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000], ids=["lists", "objects"])
def test_a_header_that_is_nested_too_deeply_is_refused(text: bytes) -> None:
    data = struct.pack("<Q", len(text)) + text
    with pytest.raises(ValueError, match="levels of nesting"):
        parse_header(data, len(data))


@pytest.mark.parametrize("data", [b"", b"1234567", struct.pack("<Q", 2**60) + b"{}"])
def test_a_header_longer_than_the_object_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="expected a safetensors header"):
        header_bytes(data, len(data))
