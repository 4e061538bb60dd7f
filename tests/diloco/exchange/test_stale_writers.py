"""Invariant I6: the contribution of a replica's newer process counts, in any order of arrival."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from diloco.clock import SystemClock
from diloco.exchange.round_observer import Base, RoundObserver
from diloco.membership.lease import Lease
from diloco.membership.observer import Observer
from diloco.model.fragments import Slot, Table
from diloco.protocol import keys
from diloco.protocol.records import ContributionRecord, Identity
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore

OLD, NEW = "00001-ffffffff", "00002-00000000"


def record(incarnation: str, replica: int = 1) -> ContributionRecord:
    return ContributionRecord(
        round=1,
        fragment=0,
        base_round=0,
        base_digest="",
        replica=replica,
        incarnation=incarnation,
        model_hash="",
        codec="fp32",
        numel=1,
        tokens=1,
        new_tokens=1,
        steps=1,
        rounds=1,
        loss=0.0,
        norm=0.0,
        norms=(0.0,),
        size_bytes=260,
        digest="",
        compute_s=0.0,
        encode_s=0.0,
        wall_s=0.0,
    )


class Harness:
    def __init__(self, root: Path) -> None:
        self.store = LocalStore(root)
        table = Table(
            [Slot(name="w", shape=(1,), dtype="float32", numel=1)], fragments=1, pattern="strided"
        )
        lease = Lease(
            self.store,
            Identity(replica=0, incarnation=OLD),
            clock=SystemClock(),
            interval_s=1.0,
            heartbeat_timeout_s=15.0,
            device="cpu",
        )
        self.round_observer = RoundObserver(
            self.store,
            GroupSettings(),
            lease=lease,
            observer=Observer(self.store, clock=SystemClock(), timeout_s=15.0),
            model_hash="",
            table=table,
        )

    def put(self, incarnation: str, data: bytes | None = None) -> None:
        key = keys.contribution_record(1, 1, incarnation)
        self.store.put(key, data or record(incarnation).to_bytes())

    def seen(self) -> list[str]:
        base = Base(round=0, digest="")
        view = self.round_observer.before_plan(1, base, waited_s=0.0, sync_s=0.0)
        return [contribution.incarnation for contribution in view.contributions.values()]


@pytest.mark.parametrize("order", [(OLD, NEW), (NEW, OLD)])
def test_the_newer_process_counts_in_any_order_of_arrival(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    harness = Harness(tmp_path)
    harness.put(order[0])
    assert harness.seen() == [order[0]], "a dead writer's durable contribution counts"
    harness.put(order[1])
    assert harness.seen() == [NEW]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[" * 100_000,
        b'{"v": 3}',
        b"\x80\x04K\x01.",
        record(OLD).to_bytes(),
        dataclasses.replace(record(NEW), replica=0).to_bytes(),
        record(NEW).to_bytes().replace(b'"loss":0.0', b'"loss":1' + b"0" * 400),
        record(NEW).to_bytes().replace(b'"tokens":1', b'"tokens":"../../x"'),
    ],
    ids=["empty", "deep", "bare", "pickle", "old", "other", "huge number", "wrong type"],
)
def test_an_invalid_record_of_the_newer_process_leaves_the_older(
    tmp_path: Path, data: bytes
) -> None:
    harness = Harness(tmp_path)
    harness.put(OLD)
    harness.store.put(keys.contribution_record(1, 1, NEW), data)
    assert harness.seen() == [OLD]


def test_other_keys_are_ignored(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.put(OLD)
    for name in ("00001.json", "x.json", f"00001.{NEW}.bin", f"000001.{NEW}.json", "a/b.json"):
        harness.store.put(keys.contributions(1) + name, record(NEW).to_bytes())
    assert harness.seen() == [OLD]
