"""Single faults at chosen places, in virtual time."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest

from diloco.membership.start_barrier import wait_for_start
from diloco.protocol import keys
from diloco.protocol.records import Plan
from diloco.protocol.settings import GroupSettings
from diloco.protocol.telemetry import Segment
from diloco.store.base import StoreDenied, StoreUnavailable
from tests.diloco.model import oracle
from tests.diloco.model.faulty_bucket import Bucket, Chances
from tests.diloco.model.harness import Coordinates, Harness, Scenario, virtual
from tests.matrix import matrix


def make_harness(
    *,
    replicas: int = 3,
    seed: int = 1,
    step_s: Mapping[int, float] = MappingProxyType({}),
    **settings: Any,
) -> Harness:
    chosen: dict[str, Any] = {
        "sync_every": 3,
        "total_rounds": 6,
        "num_replicas": replicas,
        "min_quorum": replicas,
        "warmup_steps": 0,
        "eval_every": 0,
        "state_every": 0,
        "checkpoint_every": 100,
        "reduce_plan": "gather",
        **settings,
    }
    scenario = Scenario(
        settings=GroupSettings(**chosen),
        replicas=replicas,
        chances=Chances(),
        kills=0,
        step_s=step_s,
    )
    return Harness(scenario, random.Random(seed))


def run(harness: Harness) -> None:
    """Run to the end, then check with the oracle."""
    with virtual(harness):
        harness.run()
    bucket = harness.bucket
    oracle.check(
        bucket.objects,
        bucket.written,
        bucket.written_s,
        harness.settings.to_dict(),
        swept_s=harness.swept_s,
        damaged=bucket.ever_damaged,
    )


@contextmanager
def on_put(bucket: Bucket, hook: Callable[[str], None]) -> Iterator[None]:
    """Call ``hook`` with each key after it was written."""
    put = bucket.put

    def watched(key: str, data: bytes) -> None:
        put(key, data)
        hook(key)

    bucket.put = watched  # type: ignore[method-assign]
    yield
    bucket.put = put  # type: ignore[method-assign]


def destroy(bucket: Bucket, key: str) -> None:
    data = bucket.objects[key]
    bucket.damage(key, "flip", data[:-1] + bytes([data[-1] ^ 1]))


def remove(bucket: Bucket, key: str) -> None:
    bucket.damage(key, "cut", b"")
    del bucket.objects[key]


def ends(harness: Harness) -> list[tuple[str, str]]:
    return [(life.reason, repr(life.error)) for life in harness.lives]


@matrix(
    ("plan", "kind"),
    [("gather", ".bin"), ("sharded", ".bin"), ("sharded", "/reduced/")],
    fast=[("sharded", ".bin")],
)
def test_objects_damaged_after_the_commit_do_not_stop_the_quorum(plan: str, kind: str) -> None:
    """The committer has applied the round; the others cannot read its payloads, and the quorum
    needs them. In a sharded round, payloads and shards replace each other."""
    rescued = False
    for seed in range(
        1, 5
    ):  # in some schedules the others have read the payloads before the commit
        harness = make_harness(reduce_plan=plan, seed=seed)
        with on_put(harness.bucket, partial(spoil_round_3, harness, kind)):
            run(harness)
        assert ends(harness) == [("completed", "None")] * 3
        rescued |= "checkpoints/00000003/manifest.json" in harness.bucket.written
        assert harness.scheduler.now_s < 1000 + 200, "no replica waits for a timeout"
    assert rescued == (plan == "gather")


def spoil_round_3(harness: Harness, kind: str, key: str) -> None:
    """When its commit is written."""
    if key == "rounds/00000003/commit.json":
        for name in list(harness.bucket.objects):
            if name.startswith("rounds/00000003/") and kind in name:
                destroy(harness.bucket, name)


@pytest.mark.parametrize("name", ["manifest.json", "weights.safetensors", "outer.safetensors"])
def test_a_damaged_first_checkpoint_does_not_stop_the_quorum(name: str) -> None:
    """Its writer still has the state. No round is committed yet, and none can be without the other
    replicas."""
    harness = make_harness(replicas=3)
    spoilt: list[str] = []

    def spoil(key: str) -> None:
        if key == "checkpoints/00000000/manifest.json" and not spoilt:
            spoilt.append(key)
            for damaged in list(harness.bucket.objects):
                if damaged.startswith("checkpoints/") and damaged.endswith(name):
                    destroy(harness.bucket, damaged)

    with on_put(harness.bucket, spoil):
        run(harness)
    assert ends(harness) == [("completed", "None")] * 3


@pytest.mark.parametrize("record", ["commit.json", "plan.json"])
def test_a_decision_damaged_when_written_stops_no_replica(record: str) -> None:
    harness = make_harness()
    spoilt: list[str] = []

    def spoil(key: str) -> None:
        if key == f"rounds/00000003/{record}" and not spoilt:
            spoilt.append(key)
            destroy(harness.bucket, key)

    with on_put(harness.bucket, spoil):
        run(harness)
    assert ends(harness) == [("completed", "None")] * 3


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("record", ["commit.json", "plan.json"])
def test_a_decision_damaged_after_all_have_applied_it_stops_no_replica(
    record: str, overlap: int
) -> None:
    """Replicas read earlier commits to find who voided the rounds; a damaged one must not end
    them."""
    harness = make_harness(overlap_steps=overlap)

    def spoil(key: str) -> None:
        if key == "rounds/00000004/commit.json":
            destroy(harness.bucket, f"rounds/00000003/{record}")

    with on_put(harness.bucket, spoil):
        run(harness)
    assert ends(harness) == [("completed", "None")] * 3


def test_a_damaged_contribution_record_is_rewritten() -> None:
    harness = make_harness()
    spoilt: list[str] = []

    def spoil(key: str) -> None:
        if key.startswith("rounds/00000002/") and key.endswith(".json") and "/00001." in key:
            spoilt.append(key)
            if len(spoilt) == 1:
                destroy(harness.bucket, key)

    with on_put(harness.bucket, spoil):
        run(harness)
    assert ends(harness) == [("completed", "None")] * 3 and len(spoilt) == 2


@matrix("overlap", [0, 2], fast=1)
@matrix("steps", [1, 3], fast=1)
@pytest.mark.parametrize("damage", [destroy, remove])
def test_a_damaged_contribution_of_a_process_that_left_is_repeated(
    damage: Callable[[Bucket, str], None], steps: int, overlap: int
) -> None:
    """The quorum needs all replicas; the other replica cannot plan the round without the record."""
    harness = make_harness(replicas=2, overlap_steps=overlap)
    spoilt: list[str] = []

    def spoil(key: str) -> None:
        if key.startswith("rounds/00000003/contributions/00001.00001") and key.endswith(".json"):
            spoilt.append(key)
            damage(harness.bucket, key)

    make_step = Coordinates.count

    def count(model: Coordinates, step: int) -> None:
        make_step(model, step)
        life = next(life for life in harness.lives if life.model is model)
        made = 6 + steps  # two rounds of three steps, and some of the third
        if life is harness.lives[1] and len(life.steps) == made - 1:
            assert life.group is not None
            life.group.leave(within_s=20.0, reason="drained")

    with on_put(harness.bucket, spoil), mock.patch.object(Coordinates, "count", count):
        run(harness)
    assert spoilt, "the record of a process that left was damaged"
    assert [life.reason for life in harness.lives] == ["completed", "left", "completed"]


@pytest.mark.parametrize("plan", ["gather", "sharded", "syncer"])
def test_a_plan_damaged_when_its_planner_dies_voids_the_round(plan: str) -> None:
    """No process has read it, so otherwise no later round would ever be planned."""
    harness = make_harness(reduce_plan=plan)
    harness.scenario = replace(harness.scenario, syncer=plan == "syncer")
    spoilt: list[str] = []

    def spoil(key: str) -> None:
        if key == "rounds/00000003/plan.json":
            spoilt.append(key)
            destroy(harness.bucket, key)
            process = harness.scheduler.process
            assert process is not None
            harness.scheduler.kill(process)

    with on_put(harness.bucket, spoil):
        run(harness)
    assert len(spoilt) == 1
    completed = {life.replica for life in harness.lives if life.reason == "completed"}
    assert completed >= {0, 1, 2}
    commit = json.loads(harness.bucket.written["rounds/00000003/commit.json"])
    assert spoilt[0] in commit["void"] and commit["contributors"] == []
    timeout_s = harness.scenario.settings.round_timeout_s
    assert harness.scheduler.now_s < 1000 + timeout_s, "no replica waits for the timeout of a round"


@pytest.mark.parametrize("planner", ["lives", "dies"])
@matrix("damage", ["mode", "weight", "contributions", "owners"], fast=("weight",))
def test_a_refused_plan_ends_no_replica(damage: str, planner: str) -> None:
    """Its bytes are intact, but no planner makes it: a round without a commit is void."""
    harness = make_harness(reduce_plan="sharded" if damage == "owners" else "gather")
    refused: list[str] = []

    def spoil(key: str) -> None:
        if key != "rounds/00000003/plan.json":
            return
        refused.append(key)
        plan = Plan.from_bytes(harness.bucket.objects[key])
        first, *others = plan.contributions
        changed = {
            "mode": {"mode": "ring"},
            "weight": {"contributions": (replace(first, weight=0.0), *others)},
            "contributions": {"contributions": ()},
            "owners": {"owners": ()},
        }[damage]
        harness.bucket.objects[key] = replace(plan, **changed).to_bytes()  # type: ignore[arg-type]
        process = harness.scheduler.process
        assert process is not None
        if planner == "dies":
            harness.scheduler.kill(process)

    with on_put(harness.bucket, spoil):
        run(harness)
    assert len(refused) == 1
    completed = {life.replica for life in harness.lives if life.reason == "completed"}
    assert completed >= {0, 1, 2}
    if planner == "dies":
        commit = json.loads(harness.bucket.written["rounds/00000003/commit.json"])
        assert refused[0] in commit["void"] and "expected" in commit["void"]


def test_a_leaving_replica_repairs_the_commit_of_its_last_round() -> None:
    """It is the only replica, and no checkpoint contains the round."""
    harness = make_harness(replicas=1)
    spoilt: list[str] = []

    def spoil(key: str) -> None:
        if key == "rounds/00000003/commit.json" and not spoilt:
            spoilt.append(key)
            destroy(harness.bucket, key)
            group = harness.lives[0].group
            assert group is not None
            group.leave(within_s=0.0, reason="drained")

    with on_put(harness.bucket, spoil):
        run(harness)
    assert ends(harness) == [("left", "None"), ("completed", "None")]


def test_the_work_of_quarantine_is_in_no_contribution() -> None:
    """A third replica joins late; its first counted contribution contains one round's steps."""
    harness = make_harness(
        replicas=2, total_rounds=12, quarantine_rounds=3, grace_s=30.0, num_fragments=1
    )
    harness.settings = harness.scenario.settings

    def watch(key: str) -> None:
        if key == "rounds/00000002/commit.json":
            harness.launch(2)

    with on_put(harness.bucket, watch):
        run(harness)
    plans = [
        json.loads(data)
        for key, data in sorted(harness.bucket.written.items())
        if key.endswith("/plan.json")
    ]
    quarantined = [p["round"] for p in plans for r in p["refused"] if r["kind"] == "quarantine"]
    steps = [c["steps"] for p in plans for c in p["contributions"] if c["replica"] == 2]
    assert len(quarantined) >= 3 and steps, "it was kept out, then let in"
    assert max(steps) <= 3


def test_a_later_sweep_deletes_what_an_earlier_one_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies during two sweeps; a payload arrives long after the sweep of its round."""
    from diloco.training.sweep import sweep

    harness = make_harness(checkpoint_every=1, total_rounds=10)
    calls: list[int] = []

    def dies_at_first(store: Any, **how: Any) -> int:
        calls.append(1)
        return 0 if len(calls) in (4, 5) else sweep(store, **how)

    def late(key: str) -> None:
        if key == "checkpoints/00000006/manifest.json":
            harness.bucket.objects["rounds/00000003/contributions/00000.00001-0000abcd.bin"] = (
                b"late"
            )
            harness.bucket.written_s["rounds/00000003/contributions/00000.00001-0000abcd.bin"] = 0.0

    monkeypatch.setattr("diloco.training.post_round.sweep", dies_at_first)
    with on_put(harness.bucket, late):
        run(harness)
    assert len(calls) > 5


@pytest.mark.parametrize("pack_records", ["on", "off"])
def test_the_writers_of_checkpoints_pack_old_rounds(pack_records: str) -> None:
    harness = make_harness(checkpoint_every=1, total_rounds=10, pack_records=pack_records)
    run(harness)
    objects = harness.bucket.objects
    packs = [key for key in objects if key.startswith(keys.PACKS)]
    expected = [1, 3, 5] if pack_records == "on" else []
    assert packs[: len(expected)] == [keys.round_pack(n) for n in expected]
    assert bool(packs) == bool(expected)
    left = {int(key.split("/")[1]) for key in objects if keys.parse_contribution_record(key)}
    assert (1 in left) == (3 in left) == (pack_records == "off")


@pytest.mark.parametrize("telemetry_packs", [0, 1])
def test_a_replica_keeps_the_newest_packs_of_telemetry(telemetry_packs: int) -> None:
    harness = make_harness(total_rounds=4, telemetry_packs=telemetry_packs)
    earlier = ("00000-00000000", "00000-00000001")
    for incarnation in earlier:
        segment = Segment(replica=0, incarnation=incarnation, n=1, wall_s=0, state="left", round=1)
        harness.bucket.put(keys.telemetry(0, incarnation, 1), segment.to_bytes())
    run(harness)
    packs = [key for key in harness.bucket.objects if keys.parse_telemetry_pack(key)]
    kept = earlier[1:] if telemetry_packs else earlier
    assert packs == [keys.telemetry_pack(0, incarnation, 1) for incarnation in kept]


def test_a_replica_joins_during_an_outage_of_minutes() -> None:
    harness = make_harness(replicas=2)
    away = {"from": 1000.0, "to": 1240.0}
    chances = harness.chances

    def outage() -> Chances:
        is_away = away["from"] <= harness.scheduler.now_s < away["to"]
        return Chances(drop=1.0) if is_away else chances()

    harness.chances = outage  # type: ignore[method-assign]
    run(harness)
    assert ends(harness) == [("completed", "None")] * 2


def test_a_joining_replica_retries_its_first_heartbeat() -> None:
    """The store fails between the claim of an incarnation and the first heartbeat."""
    harness = make_harness(replicas=2)
    chances = harness.chances

    def outage() -> Chances:
        is_away = 1000.1 <= harness.scheduler.now_s < 1200.0
        return Chances(drop=1.0) if is_away else chances()

    harness.chances = outage  # type: ignore[method-assign]
    run(harness)
    assert ends(harness) == [("completed", "None")] * 2


def denied_during_training(harness: Harness, *, seconds: float) -> None:
    """From the second commit on, the bucket denies all requests for a while."""
    chances = harness.chances
    from_s: list[float] = []

    def denial() -> Chances:
        is_denied = bool(from_s) and from_s[0] <= harness.scheduler.now_s < from_s[0] + seconds
        return Chances(deny=1.0) if is_denied else chances()

    def watch(key: str) -> None:
        if key == "rounds/00000002/commit.json":
            from_s.append(harness.scheduler.now_s)

    harness.chances = denial  # type: ignore[method-assign]
    with on_put(harness.bucket, watch):
        run(harness)


@pytest.mark.parametrize("plan", ["gather", "sharded", "syncer"])
def test_a_temporary_denial_ends_no_replica(plan: str) -> None:
    harness = make_harness(reduce_plan=plan, state_every=1, checkpoint_every=2)
    harness.scenario = replace(harness.scenario, syncer=plan == "syncer")
    denied_during_training(harness, seconds=30.0)
    assert ends(harness) == [("completed", "None")] * (4 if plan == "syncer" else 3)


def test_a_long_denial_ends_the_replicas_as_unavailable() -> None:
    """They end as in an outage, so that they are launched again."""
    harness = make_harness(state_every=1)
    denied_during_training(harness, seconds=200.0)
    errors = [life.error for life in harness.lives if life.error is not None]
    assert errors and {type(error) for error in errors} <= {StoreUnavailable, StoreDenied}
    first = [life.error for life in harness.lives[:3]]
    assert {type(error) for error in first} == {StoreUnavailable}
    assert {life.replica for life in harness.lives if life.reason == "completed"} == {0, 1, 2}


def test_an_outage_before_the_first_step_ends_no_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lasts longer than the retries of a heartbeat, while replicas wait at the start barrier."""
    harness = make_harness(replicas=2)
    chances = harness.chances
    from_s: list[float] = []

    def outage() -> Chances:
        is_away = bool(from_s) and from_s[0] <= harness.scheduler.now_s < from_s[0] + 40.0
        return Chances(drop=1.0) if is_away else chances()

    def begins(*arguments: Any, **how: Any) -> None:
        from_s.append(harness.scheduler.now_s)
        wait_for_start(*arguments, **how)

    harness.chances = outage  # type: ignore[method-assign]
    monkeypatch.setattr("diloco.training.round_loop.wait_for_start", begins)
    run(harness)
    assert ends(harness) == [("completed", "None")] * 2


def test_a_denial_before_the_first_heartbeat_is_retried() -> None:
    """Permissions of the main store count for the store of the heartbeat."""
    harness = make_harness(replicas=1, min_quorum=1)
    chances = harness.chances

    def denial() -> Chances:
        beats = any("/beat.json" in key for key in harness.bucket.written)
        is_denied = beats and harness.scheduler.now_s < 1030.0
        return Chances(deny=1.0) if is_denied else chances()

    harness.chances = denial  # type: ignore[method-assign]
    run(harness)
    assert ends(harness) == [("completed", "None")]
