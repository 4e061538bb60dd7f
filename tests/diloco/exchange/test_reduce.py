"""What a reduction must not believe: copied digests, and lengths next to nothing."""

from __future__ import annotations

from pathlib import Path

import torch

from diloco.clock import SystemClock
from diloco.codecs import get_codec
from diloco.exchange.payload import Packing, PayloadInfo
from diloco.exchange.reduce import Own, Reducer
from diloco.model.fragments import Slot
from diloco.protocol import keys
from diloco.protocol.records import Identity, Plan, PlannedContribution
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore

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
    packing = Packing(info, vector, get_codec("fp32"), SLOTS, clock=SystemClock())
    store.put_stream(keys.contribution_payload(1, replica, INCARNATION), packing.parts)
    return PlannedContribution(
        replica=replica, incarnation=INCARNATION, weight=0.5, tokens=1, new_tokens=1, steps=1,
        compute_s=1.0, loss=0.0, size_bytes=packing.size_bytes, digest=packing.digest,
        checksums=packing.checksums, norms=packing.norms,
    )  # fmt: skip


def plan(*contributions: PlannedContribution) -> Plan:
    return Plan(
        round=1, fragment=0, mode="gather", planner=ME, contributions=contributions, wall_s=0.0
    )


def test_a_copied_digest_makes_nobody_take_its_own_vector_for_anothers(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    mine, theirs = contribute(store, 0, 1.0, 2.0, 3.0), contribute(store, 1, 5.0, 6.0, 7.0)
    liar = PlannedContribution(**{**vars(theirs), "digest": mine.digest})
    reducer = Reducer(store, GroupSettings(), SystemClock())
    own = Own(identity=ME, digest=mine.digest, vector=torch.tensor([1.0, 2.0, 3.0]))
    here = reducer.gather(plan(mine, liar), SLOTS, own, reducer.meter())
    elsewhere = reducer.gather(plan(mine, liar), SLOTS, None, reducer.meter())
    assert here.digest == elsewhere.digest
    assert here.vector.tolist() == [3.0, 4.0, 5.0]


def test_directions_of_next_to_nothing_leave_the_mean_finite(tmp_path: Path) -> None:
    """RDA divides by lengths; a subnormal one must not make an infinity of its weight."""
    store = LocalStore(tmp_path)
    tiny, normal = contribute(store, 0, 1.0, 0.0, 1e-40), contribute(store, 1, 0.0, 1.0, 2.0)
    assert 0 < tiny.norms[1] < 1e-38
    reducer = Reducer(store, GroupSettings(merge="rda"), SystemClock())
    merged = reducer.gather(plan(tiny, normal), SLOTS, None, reducer.meter())
    torch.testing.assert_close(merged.vector, torch.tensor([0.5**0.5, 0.5**0.5, 1.0]))
    alone = reducer.gather(plan(tiny), SLOTS, None, reducer.meter())
    assert bool(torch.isfinite(alone.vector).all())
