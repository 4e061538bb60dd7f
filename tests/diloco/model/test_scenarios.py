"""Single faults under virtual time, each at a chosen place."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest

from diloco.membership.start_barrier import wait_for_everybody
from diloco.protocol.settings import GroupSettings
from diloco.store.base import StoreDenied, StoreUnavailable
from tests.diloco.model import oracle
from tests.diloco.model.faulty_bucket import Bucket, Chances
from tests.diloco.model.world import Coordinates, Scenario, World, virtual


def make_world(*, replicas: int = 3, seed: int = 1, **settings: Any) -> World:
    chosen: dict[str, Any] = {
        "sync_every": 3, "total_rounds": 6, "num_replicas": replicas, "min_quorum": replicas,
        "warmup_steps": 0, "eval_every": 0, "state_every": 0, "checkpoint_every": 100,
        "reduce_plan": "gather", **settings,
    }  # fmt: skip
    scenario = Scenario(
        settings=GroupSettings(**chosen), replicas=replicas, chances=Chances(), kills=0
    )
    return World(scenario, random.Random(seed))


def run(world: World) -> None:
    """To its end; then the oracle judges."""
    with virtual(world):
        world.run()
    bucket = world.bucket
    oracle.check(
        bucket.objects,
        bucket.written,
        bucket.written_s,
        world.settings.to_dict(),
        swept_s=world.swept_s,
    )


@contextmanager
def on_put(bucket: Bucket, hook: Callable[[str], None]) -> Iterator[None]:
    """``hook`` sees each key after it was written."""
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


def ends(world: World) -> list[tuple[str, str]]:
    return [(life.reason, repr(life.error)) for life in world.lives]


@pytest.mark.parametrize(
    ("plan", "kind"), [("gather", ".bin"), ("sharded", ".bin"), ("sharded", "/reduced/")]
)
def test_objects_that_are_damaged_after_the_commit_stop_no_quorum(plan: str, kind: str) -> None:
    """The committer has applied the round; the others cannot read its payloads, and are needed. Of
    a sharded round, payloads and shards stand in for each other."""
    rescued = False
    for seed in range(1, 5):  # in some orders the others have read the payloads before the commit
        world = make_world(reduce_plan=plan, seed=seed)
        with on_put(world.bucket, partial(spoil_round_3, world, kind)):
            run(world)
        assert ends(world) == [("completed", "None")] * 3
        rescued |= "checkpoints/00000003/manifest.json" in world.bucket.written
        assert world.scheduler.now_s < 1000 + 200, "no replica waits for a timeout"
    assert rescued == (plan == "gather")


def spoil_round_3(world: World, kind: str, key: str) -> None:
    """When its commit is written."""
    if key == "rounds/00000003/commit.json":
        for name in list(world.bucket.objects):
            if name.startswith("rounds/00000003/") and kind in name:
                destroy(world.bucket, name)


@pytest.mark.parametrize("name", ["manifest.json", "weights.safetensors", "outer.safetensors"])
def test_a_first_checkpoint_that_is_damaged_stops_no_quorum(name: str) -> None:
    """The replica that wrote it holds its state; no round is committed yet, and none can be without
    the other replicas."""
    world = make_world(replicas=3)
    spoilt: list[str] = []

    def spoil(key: str) -> None:
        if key == "checkpoints/00000000/manifest.json" and not spoilt:
            spoilt.append(key)
            for damaged in list(world.bucket.objects):
                if damaged.startswith("checkpoints/") and damaged.endswith(name):
                    destroy(world.bucket, damaged)

    with on_put(world.bucket, spoil):
        run(world)
    assert ends(world) == [("completed", "None")] * 3


@pytest.mark.parametrize("record", ["commit.json", "plan.json"])
def test_a_decision_that_is_damaged_once_it_is_made_stops_nobody(record: str) -> None:
    world = make_world()
    spoilt: list[str] = []

    def spoil(key: str) -> None:
        if key == f"rounds/00000003/{record}" and not spoilt:
            spoilt.append(key)
            destroy(world.bucket, key)

    with on_put(world.bucket, spoil):
        run(world)
    assert ends(world) == [("completed", "None")] * 3


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("record", ["commit.json", "plan.json"])
def test_a_decision_that_is_damaged_after_all_have_applied_it_stops_nobody(
    record: str, overlap: int
) -> None:
    """Who voided the rounds before is looked up in their commits: that is no reason to end."""
    world = make_world(overlap_steps=overlap)

    def spoil(key: str) -> None:
        if key == "rounds/00000004/commit.json":
            destroy(world.bucket, f"rounds/00000003/{record}")

    with on_put(world.bucket, spoil):
        run(world)
    assert ends(world) == [("completed", "None")] * 3


def test_a_contribution_record_that_is_damaged_is_written_again() -> None:
    world = make_world()
    spoilt: list[str] = []

    def spoil(key: str) -> None:
        if key.startswith("rounds/00000002/") and key.endswith(".json") and "/00001." in key:
            spoilt.append(key)
            if len(spoilt) == 1:
                destroy(world.bucket, key)

    with on_put(world.bucket, spoil):
        run(world)
    assert ends(world) == [("completed", "None")] * 3 and len(spoilt) == 2


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("damage", [destroy, remove])
def test_a_contribution_is_made_again_if_its_process_left_and_its_record_is_damaged(
    damage: Callable[[Bucket, str], None], steps: int, overlap: int
) -> None:
    """The quorum needs all replicas; the other replica cannot plan the round without the record."""
    world = make_world(replicas=2, overlap_steps=overlap)
    spoilt: list[str] = []

    def spoil(key: str) -> None:
        if key.startswith("rounds/00000003/contributions/00001.00001") and key.endswith(".json"):
            spoilt.append(key)
            damage(world.bucket, key)

    make_step = Coordinates.count

    def count(model: Coordinates, step: int) -> None:
        make_step(model, step)
        life = next(life for life in world.lives if life.model is model)
        made = 6 + steps  # two rounds of three steps, and some of the third
        if life is world.lives[1] and len(life.steps) == made - 1:
            assert life.group is not None
            life.group.leave(within_s=20.0, reason="drained")

    with on_put(world.bucket, spoil), mock.patch.object(Coordinates, "count", count):
        run(world)
    assert spoilt, "the record of a process that left was damaged"
    assert [life.reason for life in world.lives] == ["completed", "left", "completed"]


@pytest.mark.parametrize("plan", ["gather", "sharded", "syncer"])
def test_a_plan_that_is_damaged_when_its_planner_dies_voids_the_round(plan: str) -> None:
    """No process has read it, so no round after it would ever be planned."""
    world = make_world(reduce_plan=plan)
    world.scenario = replace(world.scenario, syncer=plan == "syncer")
    spoilt: list[str] = []

    def spoil(key: str) -> None:
        if key == "rounds/00000003/plan.json":
            spoilt.append(key)
            destroy(world.bucket, key)
            process = world.scheduler.process
            assert process is not None
            world.scheduler.kill(process)

    with on_put(world.bucket, spoil):
        run(world)
    assert len(spoilt) == 1
    completed = {life.replica for life in world.lives if life.reason == "completed"}
    assert completed >= {0, 1, 2}
    commit = json.loads(world.bucket.written["rounds/00000003/commit.json"])
    assert spoilt[0] in commit["void"] and commit["contributors"] == []
    assert world.scheduler.now_s < 1000 + 300, "no replica waits for the timeout of a round"


def test_a_replica_that_leaves_mends_the_commit_of_its_last_round() -> None:
    """It leaves alone, and no checkpoint holds the round."""
    world = make_world(replicas=1)
    spoilt: list[str] = []

    def spoil(key: str) -> None:
        if key == "rounds/00000003/commit.json" and not spoilt:
            spoilt.append(key)
            destroy(world.bucket, key)
            group = world.lives[0].group
            assert group is not None
            group.leave(within_s=0.0, reason="drained")

    with on_put(world.bucket, spoil):
        run(world)
    assert ends(world) == [("left", "None"), ("completed", "None")]


def test_what_a_replica_did_in_quarantine_is_in_no_contribution() -> None:
    """A third replica joins late; its first counted contribution holds one round's steps."""
    world = make_world(
        replicas=2, total_rounds=12, quarantine_rounds=3, grace_s=30.0, num_fragments=1
    )
    world.settings = world.scenario.settings

    def watch(key: str) -> None:
        if key == "rounds/00000002/commit.json":
            world.launch(2)

    with on_put(world.bucket, watch):
        run(world)
    plans = [
        json.loads(data)
        for key, data in sorted(world.bucket.written.items())
        if key.endswith("/plan.json")
    ]
    quarantined = [p["round"] for p in plans for r in p["refused"] if r["kind"] == "quarantine"]
    steps = [c["steps"] for p in plans for c in p["contributions"] if c["replica"] == 2]
    assert len(quarantined) >= 3 and steps, "it was kept out, then let in"
    assert max(steps) <= 3


def test_what_a_sweep_missed_is_deleted_by_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two sweeps the process dies; a payload arrives when its round was swept long ago."""
    from diloco.training.checkpoint import sweep

    world = make_world(checkpoint_every=1, total_rounds=10)
    calls: list[int] = []

    def dies_at_first(store: Any, **how: Any) -> int:
        calls.append(1)
        return 0 if len(calls) in (4, 5) else sweep(store, **how)

    def late(key: str) -> None:
        if key == "checkpoints/00000006/manifest.json":
            world.bucket.objects["rounds/00000003/contributions/00000.00001-0000abcd.bin"] = b"late"
            world.bucket.written_s["rounds/00000003/contributions/00000.00001-0000abcd.bin"] = 0.0

    monkeypatch.setattr("diloco.training.post_round.sweep", dies_at_first)
    with on_put(world.bucket, late):
        run(world)
    assert len(calls) > 5


def test_a_replica_joins_though_the_store_is_away_for_minutes() -> None:
    world = make_world(replicas=2)
    away = {"from": 1000.0, "to": 1240.0}
    chances = world.chances

    def outage() -> Chances:
        is_away = away["from"] <= world.scheduler.now_s < away["to"]
        return Chances(drop=1.0) if is_away else chances()

    world.chances = outage  # type: ignore[method-assign]
    run(world)
    assert ends(world) == [("completed", "None")] * 2


def test_a_replica_that_beats_in_vain_when_it_joins_keeps_trying() -> None:
    """The store goes away between the claim of an incarnation and the first beat."""
    world = make_world(replicas=2)
    chances = world.chances

    def outage() -> Chances:
        is_away = 1000.1 <= world.scheduler.now_s < 1200.0
        return Chances(drop=1.0) if is_away else chances()

    world.chances = outage  # type: ignore[method-assign]
    run(world)
    assert ends(world) == [("completed", "None")] * 2


def denied_during_training(world: World, *, seconds: float) -> None:
    """From the second commit on the bucket denies everything for a while."""
    chances = world.chances
    from_s: list[float] = []

    def denial() -> Chances:
        is_denied = bool(from_s) and from_s[0] <= world.scheduler.now_s < from_s[0] + seconds
        return Chances(deny=1.0) if is_denied else chances()

    def watch(key: str) -> None:
        if key == "rounds/00000002/commit.json":
            from_s.append(world.scheduler.now_s)

    world.chances = denial  # type: ignore[method-assign]
    with on_put(world.bucket, watch):
        run(world)


@pytest.mark.parametrize("plan", ["gather", "sharded", "syncer"])
def test_a_bucket_that_denies_for_a_while_ends_no_replica(plan: str) -> None:
    world = make_world(reduce_plan=plan, state_every=1, checkpoint_every=2)
    world.scenario = replace(world.scenario, syncer=plan == "syncer")
    denied_during_training(world, seconds=30.0)
    assert ends(world) == [("completed", "None")] * (4 if plan == "syncer" else 3)


def test_replicas_that_a_bucket_denies_for_long_end_for_now_and_go_on_later() -> None:
    """They end as if the store were away, so that they are launched again."""
    world = make_world(state_every=1)
    denied_during_training(world, seconds=200.0)
    errors = [life.error for life in world.lives if life.error is not None]
    assert errors and {type(error) for error in errors} <= {StoreUnavailable, StoreDenied}
    first = [life.error for life in world.lives[:3]]
    assert {type(error) for error in first} == {StoreUnavailable}
    assert {life.replica for life in world.lives if life.reason == "completed"} == {0, 1, 2}


def test_a_store_that_goes_away_before_the_first_step_ends_no_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For longer than a beat is tried, when replicas begin to wait for each other."""
    world = make_world(replicas=2)
    chances = world.chances
    from_s: list[float] = []

    def outage() -> Chances:
        is_away = bool(from_s) and from_s[0] <= world.scheduler.now_s < from_s[0] + 40.0
        return Chances(drop=1.0) if is_away else chances()

    def begins(*arguments: Any, **how: Any) -> None:
        from_s.append(world.scheduler.now_s)
        wait_for_everybody(*arguments, **how)

    world.chances = outage  # type: ignore[method-assign]
    monkeypatch.setattr("diloco.training.round_loop.wait_for_everybody", begins)
    run(world)
    assert ends(world) == [("completed", "None")] * 2


def test_a_denial_between_the_first_request_and_the_first_beat_is_waited_for() -> None:
    """What the main store was permitted counts for the store of the heartbeat."""
    world = make_world(replicas=1, min_quorum=1)
    chances = world.chances

    def denial() -> Chances:
        beats = any("/beat.json" in key for key in world.bucket.written)
        is_denied = beats and world.scheduler.now_s < 1030.0
        return Chances(deny=1.0) if is_denied else chances()

    world.chances = denial  # type: ignore[method-assign]
    run(world)
    assert ends(world) == [("completed", "None")]
