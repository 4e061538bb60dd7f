"""What is said of a run: small buckets built by hand, and the findings."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.inspect import inspect
from diloco.inspection.findings import findings
from diloco.inspection.picture import Picture
from diloco.inspection.reading import Scope
from diloco.protocol import keys
from diloco.protocol.records import Command, Refusal
from diloco.store.base import LocalStore
from tests.diloco.bucket_world import StillClock, World, look, who


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(LocalStore(tmp_path / "run"))


def problems(picture: Picture) -> list[str]:
    return [finding.text for finding in findings(picture) if finding.problem]


def notes(picture: Picture) -> list[str]:
    return [finding.text for finding in findings(picture) if not finding.problem]


# -- who is alive ----------------------------------------------------------------------------------


def test_a_lease_that_moves_between_two_looks_is_alive(world: World) -> None:
    world.beat(0)
    world.beat(1)
    world.beat(2, state="left")
    picture = look(world, 0)
    assert [member.life for member in picture.members] == ["live", "silent", "ended"]
    assert problems(picture) == ["replica 1 has not beaten for 3.0 s, though it means to every 2 s"]


def test_a_lease_that_rests_for_the_heartbeat_timeout_is_dead(world: World) -> None:
    world.beat(0, interval_s=12.0)
    clock = StillClock()
    picture = inspect(world.store, clock=clock)
    assert clock.slept == [15.0]
    assert [member.life for member in picture.members] == ["dead"]
    assert "replica 0 is dead: its lease has not changed for 15 s" in problems(picture)


def test_one_look_leaves_it_open_and_nobody_is_waited_for_who_has_ended(world: World) -> None:
    world.beat(0)
    clock = StillClock()
    assert inspect(world.store, clock=clock, once=True).members[0].life == "unknown"
    world.beat(0, state="done")
    assert inspect(world.store, clock=clock).members[0].life == "ended"
    assert clock.slept == []


def test_two_processes_of_one_replica(world: World) -> None:
    world.beat(1, seq=1)
    world.beat(1, seq=2)
    picture = look(world, 1)
    assert picture.incarnations == {1: 2}
    assert [member.beat.incarnation for member in picture.members] == ["00002-00000001"]
    assert "two incarnations of replica 1 are beating: 00001-00000001, 00002-00000001" in problems(
        picture
    )


def test_who_failed_says_why(world: World) -> None:
    world.beat(2, state="failed", message="expected another model")
    assert "replica 2 failed: expected another model" in problems(look(world))


# -- where it stands -------------------------------------------------------------------------------


def test_nobody_has_come_yet(world: World) -> None:
    picture = look(world)
    assert problems(picture) == []
    assert notes(picture) == ["no replica has joined yet"]


def test_below_quorum_it_waits(tmp_path: Path) -> None:
    world = World(LocalStore(tmp_path / "run"), min_quorum=2)
    world.round(1, 0, 3)
    world.checkpoint(0)
    world.contribute(2, 3)
    for replica in (0, 3):
        world.beat(replica, round=2)
    picture = look(world, 0, 3)
    assert problems(picture) == []
    assert notes(picture) == ["round 2 is waiting: quorum 1/2, live: 0, 3, not there: 0"]


def test_a_round_that_waits_for_the_dead(world: World) -> None:
    world.beat(0, round=1)
    world.contribute(1, 0)
    assert "round 1 is waiting: quorum 1/1, nobody is alive" in problems(look(world))


def test_a_contribution_without_tokens_makes_no_quorum(world: World) -> None:
    world.beat(0, round=1)
    world.contribute(1, 0, tokens=0)
    assert "round 1 is waiting: quorum 0/1, live: 0" in notes(look(world, 0))


def test_planned_and_not_committed(world: World) -> None:
    world.beat(0, round=1)
    world.contribute(1, 0, 1, 2)
    world.plan(1, 0, 1, 2, mode="sharded", owners=(0, 1, 2))
    world.store.put(keys.reduced_shard(1, 1, "0" * 64), b"mean")
    expected = (
        "round 1 is planned by replica 0, not committed yet, live: 0, 2 of 3 shards missing, "
        "of replicas 0, 2"
    )
    assert notes(look(world, 0)) == [expected]


def test_a_planned_payload_that_is_gone(world: World) -> None:
    world.beat(0)
    world.contribute(1, 0)
    world.contribute(1, 1, payload=False)
    world.plan(1, 0, 1)
    text = "round 1 plans a payload that is gone: replica 1 (00001-00000001)"
    assert text in problems(look(world, 0))


def test_a_run_that_is_over(world: World) -> None:
    world.round(1, 0, last=True)
    world.checkpoint(1)
    world.beat(0, state="done")
    world.beat(1)  # killed
    assert "round 1 was the last; the final weights are not published yet" in problems(look(world))
    world.finish(1)
    picture = look(world)
    assert problems(picture) == []
    assert notes(picture)[0] == "the run is over after round 1: completed"
    world.store.delete(["final/x/config"])
    gone = "the final manifest names an object that is gone: final/x/config"
    assert problems(look(world)) == [gone]


def test_commands_are_told(world: World) -> None:
    world.put(keys.control(1), Command(n=1, command="stop", wall_s=0.0))
    assert "command 1: stop, to all" in notes(look(world))


# -- who contributed what --------------------------------------------------------------------------


def test_every_fate_has_its_mark(world: World) -> None:
    world.round(1, 0, 1, 2, 3, 4)
    world.contribute(2, 0, 1, 2, 3, 4)
    world.plan(
        2, 0,
        refused=(
            Refusal(replica=1, incarnation="x", reason="expected a finite norm, found nan"),
            Refusal(replica=2, incarnation="x", reason="full", kind="spare"),
            Refusal(replica=3, incarnation="x", reason="round 1 of 3", kind="quarantine"),
        ),
    )  # fmt: skip
    world.commit(2, 0)
    world.contribute(3, 0, 1)
    world.plan(3, 0, 1)
    world.commit(3, 0, 1, void="replica 1: crc", committed_total=2)
    world.contribute(4, 0)
    world.report(2, 1, 4, {"round": 3, "outcome": "late"})
    for replica in range(5):
        world.beat(replica, round=4)
    picture = look(world, *range(5))
    marks = {r: "".join(picture.mark(r, shown) for shown in picture.rounds) for r in range(5)}
    assert marks == {0: "##v+", 1: "#rv.", 2: "#sl.", 3: "#q..", 4: "#l.."}
    assert problems(picture) == [
        "replica 1 was refused in round 2: expected a finite norm, found nan",
        "there are commits, but no checkpoint: nobody can join",
    ]
    assert "round 3 is void: replica 1: crc" in notes(picture)
    assert "replica 2 was spare in round 2: full" in notes(picture)


def test_three_misses_in_a_row(world: World) -> None:
    world.checkpoint(0)
    world.round(1, 0, 1, 2)
    for number in (2, 3, 4):
        world.round(number, 0)
    world.contribute(3, 2)
    world.beat(0, round=5)
    world.beat(1, round=5)
    world.beat(2, round=5)
    world.beat(3, round=5)  # has just joined: it has missed nothing
    assert problems(look(world, 0, 1, 2, 3)) == [
        "replica 1: 3 misses in a row, rounds 2 to 4 (absent)",
        "replica 2: 3 misses in a row, rounds 2 to 4 (late or absent)",
    ]


def test_when_it_is_over_a_miss_is_no_problem_any_more(world: World) -> None:
    world.checkpoint(0)
    world.round(1, 0, 1)
    for number in (2, 3, 4):
        world.round(number, 0)
    world.beat(1, round=2)
    world.finish(4)
    picture = look(world)
    assert problems(picture) == []
    assert "replica 1: 3 misses in a row, rounds 2 to 4 (absent)" in notes(picture)


def test_two_misses_are_none(world: World) -> None:
    world.checkpoint(0)
    world.round(1, 0, 1)
    world.round(2, 0)
    world.round(3, 0)
    world.beat(0, round=4)
    world.beat(1, round=4)
    assert problems(look(world, 0, 1)) == []


def test_a_replica_that_hangs_misses_from_the_round_it_is_in(world: World) -> None:
    world.checkpoint(0)
    for number in range(1, 31):
        world.round(number, 0)
    world.beat(0, round=31)
    world.beat(1, round=7)
    picture = look(world, 0, 1, scope=Scope(newest=5))
    assert problems(picture) == ["replica 1: 5 misses in a row, rounds 26 to 30 (absent)"]


def test_digests_that_differ(world: World) -> None:
    world.checkpoint(0)
    world.round(1, 0, 1, 2)
    for replica, digest in enumerate(("aaaa", "bbbb", "aaaa")):
        world.beat(replica, round=2)
        world.report(replica, 1, 1, {"round": 1, "weights_digest": digest})
    assert problems(look(world, 0, 1, 2)) == [
        "weights digests differ in round 1: aaaa at replicas 0, 2; bbbb at replica 1"
    ]


def test_a_loss_that_is_not_finite(world: World) -> None:
    world.checkpoint(0)
    world.round(1, 0, loss=float("nan"))
    assert "round 1: expected a finite loss, found nan" in problems(look(world))


# -- checkpoints, damage ---------------------------------------------------------------------------


def test_of_the_newest_two_checkpoints_nothing_may_be_gone(world: World) -> None:
    world.beat(0, round=1)
    world.checkpoint(0, without="outer")  # swept, as it should be
    world.checkpoint(5)
    world.checkpoint(10, without="weights")
    world.store.put(keys.checkpoint_dir(15, 0, who(0).incarnation) + "outer.safetensors", b"")
    picture = look(world, 0)
    gone = keys.checkpoint_dir(10, 0, who(0).incarnation) + "weights.safetensors"
    assert problems(picture) == [f"checkpoint 10 names an object that is gone: {gone}"]
    assert [(c.manifest.round, bool(c.missing)) for c in picture.checkpoints] == [
        (0, True), (5, False), (10, True),
    ]  # fmt: skip
    assert picture.unfinished_checkpoints == (15,)


def test_what_cannot_be_read_is_named_and_left_out(world: World) -> None:
    world.round(1, 0)
    world.checkpoint(0)
    world.store.put(keys.plan(1), b"{")
    world.store.put(keys.beat(1, who(1).incarnation), b'{"v": 1}')
    world.beat(0, round=2)
    picture = look(world, 0)
    assert [text.split(" cannot")[0] for text in problems(picture)] == [
        keys.beat(1, who(1).incarnation), keys.plan(1),
    ]  # fmt: skip
    assert picture.mark(0, picture.rounds[0]) == "#"
