"""A writer reads its upload back in small ranges at once, and notices damage in each of them."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.support.exchanging import BareMember, bare_settings
from diloco.clock import SystemClock
from diloco.codecs import get_codec
from diloco.exchange.payload import PayloadInfo, PayloadWriter
from diloco.exchange.upload import damage_of, upload
from diloco.model.fragments import Slot
from diloco.protocol.blocks import read_back_ranges
from diloco.store.base import PART_BYTES, LocalStore, StoreUnavailable

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


def test_a_round_that_others_have_committed_ends_although_the_payload_cannot_be_read_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, settings = LocalStore(tmp_path), bare_settings(replicas=2, plan="gather")
    first, second = (BareMember(store, number, settings, [10]) for number in range(2))
    first.put_lease()
    second.put_lease()
    failed: Future[str] = Future()
    failed.set_exception(StoreUnavailable("no route to the bucket"))
    sent = replace(second.contribute(1, torch.ones(10)), checking=failed)
    merged = first.settle(1, first.contribute(1, torch.zeros(10))).merged
    with caplog.at_level(logging.WARNING):
        result = second.settle(1, sent)
    assert merged is not None and result.merged is not None
    assert torch.equal(result.merged.vector, merged.vector)
    assert "round 1: the payload could not be read back: no route to the bucket" in caplog.text
