"""Payloads of the Manager: round trips, and refusal of unexpected data."""

from __future__ import annotations

import json
import struct
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.exchange.checked_blocks import BadPayload
from diloco.protocol import manager_keys
from diloco.protocol.records import Identity
from diloco.store.base import LocalStore
from diloco.torchft.allreduce_exchange import _Feed
from diloco.torchft.polling import Waiting
from diloco.torchft.tensor_codec import Spec, decode, encode, largest_payload, pack, spec_of, unpack
from tests.diloco.clocks import ManualClock

ME = Identity(replica=3, incarnation="00001-0000000a")
TENSORS = [
    torch.arange(6, dtype=torch.float32).view(2, 3).t(),
    torch.tensor(7, dtype=torch.int64),
    torch.empty(0, 4, dtype=torch.bfloat16),
    torch.tensor([1.5, -2.0], dtype=torch.float16),
]


def packed(first: int = 4) -> tuple[list[Spec], bytes]:
    specs = [spec_of(tensor, op="sum", quantise=False) for tensor in TENSORS]
    calls = [(spec, encode(tensor, spec)) for spec, tensor in zip(specs, TENSORS, strict=True)]
    return specs, pack(ME, calls, n=8, batch=1, first=first)


def test_tensors_round_trip() -> None:
    specs, data = packed()
    calls = unpack(data, ME, n=8, batch=1, first=4)
    assert [spec for spec, _ in calls] == specs
    for (spec, body), tensor in zip(calls, TENSORS, strict=True):
        assert decode(body, spec).dtype == tensor.dtype
        assert torch.equal(decode(body, spec).view(tensor.shape), tensor)


def test_quantised_floats_take_a_byte_each() -> None:
    tensor = torch.linspace(-1, 1, 1024)
    spec = spec_of(tensor, op="avg", quantise=True)
    body = encode(tensor, spec)
    assert len(body) == spec.size_bytes == 1024 + 4 * 4
    assert (decode(body, spec) - tensor).abs().max() <= 1 / 254 + 1e-6
    assert spec_of(torch.tensor([1]), op="sum", quantise=True).codec == ""


def test_an_unsupported_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype: expected one of .* found torch\.complex64"):
        spec_of(torch.zeros(1, dtype=torch.complex64), op="sum", quantise=False)


@pytest.mark.parametrize(
    "expected",
    [
        {"n": 9},
        {"batch": 0},
        {"first": 0},
        {"identity": Identity(replica=4, incarnation=ME.incarnation)},
        {"identity": Identity(replica=3, incarnation="00002-0000000a")},
    ],
)
def test_an_unexpected_payload_is_refused(expected: dict[str, object]) -> None:
    what: dict[str, object] = {"identity": ME, "n": 8, "batch": 1, "first": 4}
    with pytest.raises(BadPayload, match=r"batch . of member . in round .: expected"):
        unpack(packed()[1], **what | expected)  # type: ignore[arg-type]


@given(st.data())
def test_a_damaged_payload_is_refused(data: st.DataObject) -> None:
    whole = bytearray(packed()[1])
    place = data.draw(st.integers(0, len(whole) - 1))
    bit = data.draw(st.integers(0, 7))
    whole[place] ^= 1 << bit
    try:
        calls = unpack(bytes(whole), ME, n=8, batch=1, first=4)
    except BadPayload:
        return
    # The reader compares the specs, which the checksum does not cover, with its own.
    assert [spec for spec, _ in calls] != packed()[0]


@given(st.binary(max_size=300))
def test_other_data_is_refused(data: bytes) -> None:
    with pytest.raises(BadPayload):
        unpack(data, ME, n=8, batch=1, first=4)


def test_an_inconsistent_header_is_refused() -> None:
    text = json.dumps(
        {
            "specs": [{"dtype": "torch.float32", "shape": [-1], "op": "", "codec": ""}],
            "n": 8,
            "member": 3,
            "incarnation": ME.incarnation,
            "batch": 1,
            "first": 4,
            "checksum": "0",
        }
    ).encode()
    data = struct.pack("<8sI", b"ARCHIMG1", len(text)) + text
    with pytest.raises(BadPayload, match="expected tensors"):
        unpack(data, ME, n=8, batch=1, first=4)


def test_an_oversized_payload_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.torchft.allreduce_exchange.largest_payload", lambda: 1000)
    store = LocalStore(tmp_path)
    store.put(manager_keys.payload(8, ME.replica, ME.incarnation, 0), bytes(1001))
    feed = _Feed(store, 8, ME, lambda who: "")
    with pytest.raises(BadPayload, match="expected at most 1000 bytes, found more"):
        feed.fill(Waiting(ManualClock(), threading.Event(), timeout_s=1.0, longest_pause_s=1.0))
    assert largest_payload() > 2**28
