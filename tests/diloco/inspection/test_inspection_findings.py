"""Findings about small buckets that the tests write."""

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
from tests.diloco.bucket_harness import Harness, picture_of, who
from tests.diloco.clocks import ManualClock


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(LocalStore(tmp_path / "run"))


def problems(picture: Picture) -> list[str]:
    return [finding.text for finding in findings(picture) if finding.problem]


def notes(picture: Picture) -> list[str]:
    return [finding.text for finding in findings(picture) if not finding.problem]


# -- leases ----------------------------------------------------------------------------------------


def test_a_lease_that_changes_between_two_reads_is_live(harness: Harness) -> None:
    harness.beat(0)
    harness.beat(1)
    harness.beat(2, state="left")
    picture = picture_of(harness, 0)
    assert [member.life for member in picture.members] == ["live", "silent", "ended"]
    assert problems(picture) == ["replica 1 has sent no heartbeat for 3.0 s, its interval is 2 s"]


def test_a_lease_unchanged_for_the_heartbeat_timeout_is_dead(harness: Harness) -> None:
    harness.beat(0, interval_s=12.0)
    clock = ManualClock()
    picture = inspect(harness.store, clock=clock)
    assert sum(clock.pauses) == 15.0
    assert [member.life for member in picture.members] == ["dead"]
    assert "replica 0 is dead: its lease has not changed for 15 s" in problems(picture)


def test_leases_are_read_until_each_has_changed(harness: Harness) -> None:
    """Of a replica that computes for long, the next heartbeat can be three timeouts away."""
    harness.beat(0, interval_s=45.0)
    clock = ManualClock(lambda: harness.beat(0, count=2) if clock.now_s > 31.0 else None)
    picture = inspect(harness.store, clock=clock)
    assert picture.members[0].life == "live"
    assert clock.now_s == 33.0


def test_after_one_read_a_lease_is_unknown_or_ended(harness: Harness) -> None:
    harness.beat(0)
    clock = ManualClock()
    assert inspect(harness.store, clock=clock, once=True).members[0].life == "unknown"
    harness.beat(0, state="done")
    assert inspect(harness.store, clock=clock).members[0].life == "ended"
    assert clock.pauses == []


def test_two_processes_of_one_replica(harness: Harness) -> None:
    harness.beat(1, seq=1)
    harness.beat(1, seq=2)
    picture = picture_of(harness, 1)
    assert picture.incarnations == {1: 2}
    assert [member.beat.incarnation for member in picture.members] == ["00002-00000001"]
    assert "two incarnations of replica 1 are live: 00001-00000001, 00002-00000001" in problems(
        picture
    )


def test_a_failed_replica_is_reported_with_its_reason(harness: Harness) -> None:
    harness.beat(2, state="failed", message="expected another model")
    assert "replica 2 failed: expected another model" in problems(picture_of(harness))


# -- progress --------------------------------------------------------------------------------------


def test_a_run_without_replicas(harness: Harness) -> None:
    picture = picture_of(harness)
    assert problems(picture) == []
    assert notes(picture) == ["no replica has joined yet"]


def test_a_round_below_quorum(tmp_path: Path) -> None:
    harness = Harness(LocalStore(tmp_path / "run"), min_quorum=2)
    harness.round(1, 0, 3)
    harness.checkpoint(0)
    harness.contribute(2, 3)
    for replica in (0, 3):
        harness.beat(replica, round=2)
    picture = picture_of(harness, 0, 3)
    assert problems(picture) == []
    assert notes(picture) == ["round 2 is waiting: quorum 1/2, live: 0, 3, missing: 0"]


def test_a_round_that_waits_for_dead_replicas(harness: Harness) -> None:
    harness.beat(0, round=1)
    harness.contribute(1, 0)
    assert "round 1 is waiting: quorum 1/1, no replica is live" in problems(picture_of(harness))


def test_a_contribution_without_tokens_does_not_count_for_the_quorum(harness: Harness) -> None:
    harness.beat(0, round=1)
    harness.contribute(1, 0, tokens=0)
    assert "round 1 is waiting: quorum 0/1, live: 0" in notes(picture_of(harness, 0))


def test_a_planned_round_without_a_commit(harness: Harness) -> None:
    harness.beat(0, round=1)
    harness.contribute(1, 0, 1, 2)
    harness.plan(1, 0, 1, 2, mode="sharded", owners=(0, 1, 2))
    harness.store.put(keys.reduced_shard(1, 1, "0" * 64), b"mean")
    expected = (
        "round 1 is planned by replica 0, not committed yet, live: 0, 2 of 3 shards missing, "
        "of replicas 0, 2"
    )
    assert notes(picture_of(harness, 0)) == [expected]


def test_a_missing_planned_payload(harness: Harness) -> None:
    harness.beat(0)
    harness.contribute(1, 0)
    harness.contribute(1, 1, payload=False)
    harness.plan(1, 0, 1)
    text = "a planned payload of round 1 is missing: replica 1 (00001-00000001)"
    assert text in problems(picture_of(harness, 0))


def test_a_finished_run(harness: Harness) -> None:
    harness.round(1, 0, last=True)
    harness.checkpoint(1)
    harness.beat(0, state="done")
    harness.beat(1)  # killed
    assert "round 1 was the last; its final weights are not published yet" in problems(
        picture_of(harness)
    )
    harness.finish(1)
    picture = picture_of(harness)
    assert problems(picture) == []
    assert notes(picture)[0] == "the run is over after round 1: completed"
    harness.store.delete(["final/x/config"])
    missing = "an object of the final manifest is missing: final/x/config"
    assert problems(picture_of(harness)) == [missing]


def test_commands_are_reported(harness: Harness) -> None:
    harness.put(keys.control(1), Command(n=1, command="stop", wall_s=0.0))
    assert "command 1: stop, to all" in notes(picture_of(harness))


# -- contributions ---------------------------------------------------------------------------------


def test_every_outcome_has_a_mark(harness: Harness) -> None:
    harness.round(1, 0, 1, 2, 3, 4)
    harness.contribute(2, 0, 1, 2, 3, 4)
    harness.plan(
        2,
        0,
        refused=(
            Refusal(replica=1, incarnation="x", reason="expected a finite norm, found nan"),
            Refusal(replica=2, incarnation="x", reason="full", kind="spare"),
            Refusal(replica=3, incarnation="x", reason="round 1 of 3", kind="quarantine"),
        ),
    )
    harness.commit(2, 0)
    harness.contribute(3, 0, 1)
    harness.plan(3, 0, 1)
    harness.commit(3, 0, 1, void="replica 1: crc", committed_total=2)
    harness.contribute(4, 0)
    harness.report(2, 1, 4, {"round": 3, "outcome": "late"})
    for replica in range(5):
        harness.beat(replica, round=4)
    picture = picture_of(harness, *range(5))
    marks = {r: "".join(picture.mark(r, shown) for shown in picture.rounds) for r in range(5)}
    assert marks == {0: "##v+", 1: "#rv.", 2: "#sl.", 3: "#q..", 4: "#l.."}
    assert problems(picture) == [
        "replica 1 was refused in round 2: expected a finite norm, found nan",
        "there are commits but no checkpoint, so no replica can join",
    ]
    assert "round 3 is void: replica 1: crc" in notes(picture)
    assert "replica 2 was spare in round 2: full" in notes(picture)


def test_three_misses_in_a_row(harness: Harness) -> None:
    harness.checkpoint(0)
    harness.round(1, 0, 1, 2)
    for number in (2, 3, 4):
        harness.round(number, 0)
    harness.contribute(3, 2)
    harness.beat(0, round=5)
    harness.beat(1, round=5)
    harness.beat(2, round=5)
    harness.beat(3, round=5)  # it has just joined and missed no round
    assert problems(picture_of(harness, 0, 1, 2, 3)) == [
        "replica 1: 3 misses in a row, rounds 2 to 4 (absent)",
        "replica 2: 3 misses in a row, rounds 2 to 4 (late or absent)",
    ]


def test_misses_in_a_finished_run_are_notes(harness: Harness) -> None:
    harness.checkpoint(0)
    harness.round(1, 0, 1)
    for number in (2, 3, 4):
        harness.round(number, 0)
    harness.beat(1, round=2)
    harness.finish(4)
    picture = picture_of(harness)
    assert problems(picture) == []
    assert "replica 1: 3 misses in a row, rounds 2 to 4 (absent)" in notes(picture)


def test_two_misses_are_not_reported(harness: Harness) -> None:
    harness.checkpoint(0)
    harness.round(1, 0, 1)
    harness.round(2, 0)
    harness.round(3, 0)
    harness.beat(0, round=4)
    harness.beat(1, round=4)
    assert problems(picture_of(harness, 0, 1)) == []


def test_a_hanging_replica_misses_rounds_from_its_current_one(harness: Harness) -> None:
    harness.checkpoint(0)
    for number in range(1, 31):
        harness.round(number, 0)
    harness.beat(0, round=31)
    harness.beat(1, round=7)
    picture = picture_of(harness, 0, 1, scope=Scope(newest=5))
    assert problems(picture) == ["replica 1: 5 misses in a row, rounds 26 to 30 (absent)"]


def test_different_digests(harness: Harness) -> None:
    harness.checkpoint(0)
    harness.round(1, 0, 1, 2)
    for replica, digest in enumerate(("aaaa", "bbbb", "aaaa")):
        harness.beat(replica, round=2)
        harness.report(replica, 1, 1, {"round": 1, "weights_digest": digest})
    assert problems(picture_of(harness, 0, 1, 2)) == [
        "weights digests differ in round 1: aaaa at replicas 0, 2; bbbb at replica 1"
    ]


def test_a_non_finite_loss(harness: Harness) -> None:
    harness.checkpoint(0)
    harness.round(1, 0, loss=float("nan"))
    assert "round 1: expected a finite loss, found nan" in problems(picture_of(harness))


# -- checkpoints, damage ---------------------------------------------------------------------------


def test_missing_objects_of_the_newest_two_checkpoints_are_reported(harness: Harness) -> None:
    harness.beat(0, round=1)
    harness.checkpoint(0, without="outer")  # deleted on purpose
    harness.checkpoint(5)
    harness.checkpoint(10, without="weights")
    harness.store.put(keys.checkpoint_dir(15, 0, who(0).incarnation) + "outer.safetensors", b"")
    picture = picture_of(harness, 0)
    missing = keys.checkpoint_dir(10, 0, who(0).incarnation) + "weights.safetensors"
    assert problems(picture) == [f"an object of checkpoint 10 is missing: {missing}"]
    assert [(c.manifest.round, bool(c.missing)) for c in picture.checkpoints] == [
        (0, True),
        (5, False),
        (10, True),
    ]
    assert picture.unfinished_checkpoints == (15,)


def test_unreadable_objects_are_named_and_ignored(harness: Harness) -> None:
    harness.round(1, 0)
    harness.checkpoint(0)
    harness.store.put(keys.plan(1), b"{")
    harness.store.put(keys.beat(1, who(1).incarnation), b'{"v": 1}')
    harness.beat(0, round=2)
    picture = picture_of(harness, 0)
    assert [text.split(" cannot")[0] for text in problems(picture)] == [
        keys.beat(1, who(1).incarnation),
        keys.plan(1),
    ]
    assert picture.mark(0, picture.rounds[0]) == "#"
