"""A writer reads its upload back in small ranges at once, and notices damage in each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco.clock import SystemClock
from diloco.codecs import get_codec
from diloco.exchange.payload import PayloadInfo, PayloadWriter
from diloco.exchange.upload import damage_of, upload
from diloco.model.fragments import Slot
from diloco.protocol.blocks import read_back_ranges
from diloco.store.base import PART_BYTES, LocalStore

NUMEL = 3 * 2**20
KEY = "payload"
INFO = PayloadInfo(
    round=1, fragment=0, replica=0, incarnation="00001-00000000", codec="fp32", numel=NUMEL
)
SLOTS = (Slot(name="a", shape=(NUMEL,), dtype="float32", numel=NUMEL, offset=0),)


@pytest.mark.parametrize("size_bytes", [1, PART_BYTES // 4, PART_BYTES, PART_BYTES + 129])
def test_the_ranges_cover_a_part(size_bytes: int) -> None:
    ranges = read_back_ranges(size_bytes)
    assert [start for start, _ in ranges] == [
        sum(length for _, length in ranges[:index]) for index in range(len(ranges))
    ]
    assert sum(length for _, length in ranges) == size_bytes
    assert len(ranges) == (4 if size_bytes >= PART_BYTES else 1)


@pytest.mark.parametrize("quarter", range(3))
def test_damage_in_any_range_is_found(tmp_path: Path, quarter: int) -> None:
    store, codec = LocalStore(tmp_path), get_codec("fp32", topk=64)
    values = torch.linspace(-1.0, 1.0, NUMEL)

    def make() -> PayloadWriter:
        return PayloadWriter(INFO, values, codec, SLOTS, clock=SystemClock())

    packing, verify = upload(store, KEY, make, codec, verify_bytes=2**30)
    assert verify() == ""
    stored = bytearray(store.get(KEY))
    stored[quarter * len(stored) // 3 + 1000] ^= 1
    store.put(KEY, stored)
    assert "checksum" in damage_of(store, KEY, packing, codec, verify_bytes=2**30)
