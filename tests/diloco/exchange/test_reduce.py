"""Robust reduction: copied digests, and norms close to zero."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diloco.clock import SystemClock
from diloco.codecs import get_codec
from diloco.exchange.payload import PayloadInfo, PayloadWriter
from diloco.exchange.reduce import Own, Reduction
from diloco.exchange.timings import Timings
from diloco.model.fragments import Slot
from diloco.protocol import keys
from diloco.protocol.records import Identity, Plan, PlannedContribution
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore
from tests.diloco.exchange.planned import planned

INCARNATION = "00001-00000000"
ME = Identity(replica=0, incarnation=INCARNATION)
SLOTS = (
    Slot(name="a", shape=(2,), dtype="float32", numel=2),
    Slot(name="b", shape=(1,), dtype="float32", numel=1, offset=2),
)


def contribute(store: LocalStore, replica: int, *values: float) -> PlannedContribution:
    info = PayloadInfo(
        round=1, fragment=0, replica=replica, incarnation=INCARNATION, codec="fp32", numel=3
    )
    vector = torch.tensor(values)
    packing = PayloadWriter(info, vector, get_codec("fp32"), SLOTS, clock=SystemClock())
    store.put_stream(keys.contribution_payload(1, replica, INCARNATION), packing.parts)
    return planned(
        Identity(replica=replica, incarnation=INCARNATION),
        size_bytes=packing.size_bytes,
        digest=packing.digest,
        norms=packing.norms,
    )


def plan(*contributions: PlannedContribution) -> Plan:
    return Plan(
        round=1, fragment=0, mode="gather", planner=ME, contributions=contributions, wall_s=0.0
    )


def test_a_copied_digest_is_not_taken_for_the_own_contribution(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    own_planned, peer = contribute(store, 0, 1.0, 2.0, 3.0), contribute(store, 1, 5.0, 6.0, 7.0)
    copied = PlannedContribution(**{**vars(peer), "digest": own_planned.digest})
    timings = Timings(SystemClock())
    own = Own(identity=ME, digest=own_planned.digest, vector=torch.tensor([1.0, 2.0, 3.0]))
    reductions = [
        Reduction(
            store, GroupSettings(), plan(own_planned, copied), SLOTS, timings=timings, own=vector
        )
        for vector in (own, None)
    ]
    here, elsewhere = (reduction.gather() for reduction in reductions)
    assert here.digest == elsewhere.digest
    assert here.vector.tolist() == [3.0, 4.0, 5.0]


def test_subnormal_norms_leave_the_mean_finite(tmp_path: Path) -> None:
    """RDA divides by norms; a subnormal norm must not make a weight infinite."""
    store = LocalStore(tmp_path)
    tiny, normal = contribute(store, 0, 1.0, 0.0, 1e-40), contribute(store, 1, 0.0, 1.0, 2.0)
    assert 0 < tiny.norms[1] < 1e-38
    settings, timings = GroupSettings(merge="rda"), Timings(SystemClock())
    merged = Reduction(store, settings, plan(tiny, normal), SLOTS, timings=timings).gather()
    torch.testing.assert_close(merged.vector, torch.tensor([0.5**0.5, 0.5**0.5, 1.0]))
    alone = Reduction(store, settings, plan(tiny), SLOTS, timings=timings).gather()
    assert bool(torch.isfinite(alone.vector).all())


@pytest.mark.parametrize("merge", ["mean", "rda"])
def test_weights_that_leave_room_for_late_work_shorten_the_mean(tmp_path: Path, merge: str) -> None:
    """Half of the weights are left for late replicas: the direction stays, the length is halved."""
    store = LocalStore(tmp_path)
    contributions = contribute(store, 0, 1.0, 0.0, 4.0), contribute(store, 1, 0.0, 3.0, 2.0)
    halves = (replace(c, weight=c.weight / 2) for c in contributions)
    settings, timings = GroupSettings(merge=merge), Timings(SystemClock())
    whole, half = (
        Reduction(store, settings, plan(*chosen), SLOTS, timings=timings).gather()
        for chosen in (contributions, halves)
    )
    torch.testing.assert_close(half.vector, whole.vector / 2)
