"""Rounds read from the bucket: committed, void, refused, late, and each counted once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from diloco.protocol import keys
from diloco.protocol.records import Identity
from runs.ingest import rounds
from runs.ingest.rounds import ingest_rounds
from runs.ingest.stores import store_for
from runs.metrics.changes import Changes
from runs.models import Event, MetricBlock, Run
from tests.runs.run_harness import Bucket, Clock, identity, incarnation

pytestmark = pytest.mark.django_db


class Archive:
    """Runs only the part of a tick that reads rounds."""

    def __init__(self, run: Any, clock: Clock) -> None:
        self.run, self.clock = run, clock
        self.bucket = Bucket(store_for(run), wall_s=clock().timestamp())

    def ingest(self) -> set[int]:
        self.run.refresh_from_db()
        changes = Changes()
        ingest_rounds(self.run, self.bucket.store, now=self.clock(), changes=changes)
        self.run.refresh_from_db()
        return changes.rounds

    def round(self, number: int) -> Any:
        return self.run.rounds.get(number=number)

    def states(self, number: int) -> list[tuple[int, str]]:
        rows = self.round(number).contributions.order_by("replica__number")
        return list(rows.values_list("replica__number", "state"))


@pytest.fixture
def archive(make_run: Callable[..., Any], clock: Clock) -> Archive:
    return Archive(make_run(replicas=3), clock)


def test_a_round_grows_as_its_records_arrive(archive: Archive) -> None:
    assert archive.ingest() == set()
    assert not archive.run.rounds.exists()
    archive.bucket.contribution(1, 0)
    assert archive.ingest() == {1}
    assert (archive.round(1).state, archive.states(1)) == ("collecting", [(0, "uploaded")])
    assert archive.ingest() == set()
    archive.bucket.contribution(1, 1)
    archive.bucket.plan(1, [0, 1])
    assert archive.ingest() == {1}
    row = archive.round(1)
    assert (row.state, row.mode, row.contributors) == ("planned", "gather", 2)
    assert archive.run.committed_rounds == 0
    archive.bucket.commit(1, [0, 1])
    assert archive.ingest() == {1}
    row = archive.round(1)
    assert (row.state, row.contributors, row.tokens_total) == ("committed", 2, 2000)
    assert row.loss == 3.5  # the plan's, weighted by tokens
    assert archive.states(1) == [(0, "included"), (1, "included")]
    run = archive.run
    assert (run.committed_rounds, run.next_round, run.tokens) == (1, 2, 2000)
    assert run.committed_at == archive.clock()
    assert archive.ingest() == set()
    assert archive.run.committed_rounds == 1


def test_the_fields_of_a_contribution_record_are_stored(archive: Archive) -> None:
    archive.bucket.contribution(1, 0, loss=2.5, norm=0.75, base_round=0)
    archive.ingest()
    result = archive.round(1).contributions.get()
    assert (result.incarnation, result.loss, result.norm) == (incarnation(0), 2.5, 0.75)
    assert (result.tokens, result.steps, result.size_bytes) == (1000, 10, 40)
    assert result.uploaded_at.timestamp() == archive.bucket.wall_s


def test_the_loss_of_the_commit_takes_precedence(archive: Archive) -> None:
    archive.bucket.plan(1, [0, 1])
    archive.bucket.commit(1, [0, 1], loss=2.25)
    archive.ingest()
    assert archive.round(1).loss == 2.25


def test_a_contribution_after_the_plan_is_late(archive: Archive) -> None:
    for replica in (0, 1, 2):
        archive.bucket.contribution(1, replica)
    archive.bucket.plan(1, [0, 1])
    archive.bucket.commit(1, [0, 1])
    archive.ingest()
    assert archive.states(1) == [(0, "included"), (1, "included"), (2, "late")]
    assert archive.round(1).contributions.get(replica__number=2).reason == "uploaded after the plan"


def test_a_refused_contribution_has_its_reason(archive: Archive) -> None:
    archive.bucket.contribution(1, 2)
    archive.bucket.plan(1, [0, 1], refused={2: "based on round 7, expected 0"})
    archive.bucket.commit(1, [0, 1])
    archive.ingest()
    assert archive.states(1)[2] == (2, "refused")
    refused = archive.round(1).contributions.get(replica__number=2)
    assert refused.reason == "based on round 7, expected 0"
    [event] = Event.objects.filter(kind="contribution_refused")
    assert event.replica.number == 2
    assert "based on round 7, expected 0" in event.message


def test_a_void_round_changes_no_weights_and_names_the_replica(archive: Archive) -> None:
    for replica in (0, 1):
        archive.bucket.contribution(1, replica)
    archive.bucket.plan(1, [0, 1])
    why = "replica 1's payload: expected crc32 1, found 2"
    archive.bucket.commit(1, [], void=why, void_replica=1, tokens_total=0, committed_total=0)
    archive.ingest()
    row = archive.round(1)
    assert (row.state, row.reason, row.contributors) == ("void", why, 0)
    assert archive.states(1) == [(0, "late"), (1, "refused")]
    assert archive.round(1).contributions.get(replica__number=1).reason == why
    assert (archive.run.committed_rounds, archive.run.next_round) == (0, 2)
    [event] = Event.objects.filter(kind="round_void")
    assert (event.level, event.replica.number) == ("warning", 1)


def test_many_commits_are_read_in_one_tick_and_the_rest_in_the_next(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "COMMITS_PER_TICK", 3)
    for number in range(1, 6):
        archive.bucket.commit(number, [0, 1])
    assert archive.ingest() == {1, 2, 3}
    assert archive.ingest() == {4, 5}
    assert (archive.run.committed_rounds, archive.run.tokens) == (5, 10_000)


def test_the_statements_of_a_new_round_do_not_grow_with_its_contributions(
    archive: Archive,
) -> None:
    counts = []
    for number, replicas in ((1, [0]), (2, [0]), (3, [0, 1, 2])):
        for replica in replicas:
            archive.bucket.contribution(number, replica)
        archive.bucket.plan(number, replicas)
        archive.bucket.commit(number, replicas)
        with CaptureQueriesContext(connection) as captured:
            archive.ingest()
        counts.append(len(captured))
        assert archive.states(number) == [(replica, "included") for replica in replicas]
    assert counts[2] <= counts[1]


def test_a_second_reconciler_counts_nothing_twice(archive: Archive) -> None:
    from runs.models import Run

    archive.bucket.plan(1, [0, 1])
    archive.bucket.commit(1, [0, 1])
    stale = Run.objects.get(pk=archive.run.pk)
    archive.ingest()
    ingest_rounds(stale, archive.bucket.store, now=archive.clock(), changes=Changes())
    archive.run.refresh_from_db()
    assert (archive.run.committed_rounds, archive.run.next_round) == (1, 2)


def test_a_worker_that_dies_in_a_round_leaves_it_unread(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.bucket.plan(1, [0, 1])
    archive.bucket.commit(1, [0, 1])

    def die(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rounds._Rounds, "_store_outcomes", die)
        with pytest.raises(KeyboardInterrupt):
            archive.ingest()
    archive.run.refresh_from_db()
    assert (archive.run.next_round, archive.run.rounds.count()) == (1, 0)
    archive.ingest()
    assert (archive.run.committed_rounds, archive.states(1)[0]) == (1, (0, "included"))


@pytest.mark.parametrize("body", [b"{}", b"\xff", b"[" * 100_000])
def test_an_unreadable_commit_is_skipped_and_reported(archive: Archive, body: bytes) -> None:
    archive.bucket.store.put(keys.commit(1), body)
    archive.bucket.commit(2, [0, 1])
    archive.ingest()
    assert (archive.round(1).state, archive.round(2).state) == ("void", "committed")
    assert archive.round(1).reason.startswith("commit refused: ")
    [event] = Event.objects.filter(kind="refused")
    assert event.message.startswith(f"{keys.commit(1)} refused: ")
    assert (archive.run.committed_rounds, archive.run.refused_records) == (1, 1)


def test_a_commit_of_another_round_is_refused(archive: Archive) -> None:
    archive.bucket.commit(1, [0, 1])
    archive.bucket.store.put(keys.commit(2), archive.bucket.store.get(keys.commit(1)))
    archive.ingest()
    assert archive.round(2).reason == "commit refused: expected round 2, found 1"
    assert archive.run.committed_rounds == 1


def test_without_a_readable_plan_the_commit_decides(archive: Archive) -> None:
    archive.bucket.contribution(1, 0)
    archive.bucket.store.put(keys.plan(1), b"{}")
    archive.bucket.commit(1, [0, 1])
    archive.ingest()
    assert archive.round(1).state == "committed"
    assert archive.states(1) == [(0, "included"), (1, "included")]


def test_an_unreadable_contribution_is_refused_once(archive: Archive) -> None:
    archive.bucket.store.put(keys.contribution_record(1, 1, incarnation(1)), b"{}")
    archive.bucket.contribution(1, 2, tokens=2**60)
    for _ in range(3):
        archive.ingest()
    assert archive.states(1) == [(1, "refused"), (2, "refused")]
    assert Event.objects.filter(kind="refused").count() == 2
    assert archive.run.refused_records == 2


def test_foreign_objects_are_ignored(archive: Archive) -> None:
    archive.bucket.contribution(1, 77)
    archive.bucket.store.put(keys.contribution_payload(1, 0, incarnation(0)), b"payload")
    archive.bucket.plan(1, [0, 77])
    archive.bucket.commit(1, [0, 77])
    archive.ingest()
    assert archive.states(1) == [(0, "included")]


def test_a_relaunched_replica_s_contribution_replaces_the_earlier_one(archive: Archive) -> None:
    archive.bucket.contribution(1, 0, norm=1.0)
    archive.ingest()
    archive.bucket.contribution(1, 0, norm=2.0, seq=2)
    assert [archive.ingest() for _ in range(3)] == [{1}, set(), set()]
    result = archive.round(1).contributions.get()
    assert (result.incarnation, result.norm) == (incarnation(0, seq=2), 2.0)


def test_the_pace_is_smoothed_over_rounds(archive: Archive) -> None:
    for number in (1, 2, 3):
        archive.bucket.commit(number, [0], wall_s=archive.bucket.wall_s + 10 * number)
    archive.bucket.commit(4, [0], wall_s=archive.bucket.wall_s + 30 + 20)
    archive.ingest()
    assert archive.run.round_s == pytest.approx(0.7 * 10 + 0.3 * 20)


def test_invalid_numbers_do_not_stop_a_round(archive: Archive) -> None:
    archive.bucket.contribution(1, 0, loss=float("nan"), norm=float("inf"), wall_s=float("nan"))
    archive.bucket.commit(1, [0], loss=float("nan"), wall_s=1e300, committer=identity(9))
    archive.ingest()
    row = archive.round(1)
    assert (row.state, row.loss, row.committed_at) == ("committed", None, archive.clock())
    assert row.contributions.get().norm is None


def test_invalid_text_does_not_stop_a_round(archive: Archive) -> None:
    invalid = "\ud800\x00" * 50
    archive.bucket.plan(1, [0], refused={1: invalid}, mode=invalid)
    archive.ingest()
    stranger = Identity(replica=2, incarnation=invalid)
    archive.bucket.commit(1, [0], contributors=(identity(0), stranger))
    archive.ingest()
    assert archive.states(1) == [(0, "included"), (1, "refused"), (2, "included")]


def test_a_pause_does_not_count_towards_the_round_time(archive: Archive) -> None:
    start = archive.bucket.wall_s
    for number, at in ((1, 10), (2, 20), (3, 7230), (4, 7240)):
        archive.bucket.commit(number, [0], wall_s=start + at)
        if number == 3:
            sent_on = datetime.fromtimestamp(start + 7200, tz=UTC)
            Run.objects.filter(pk=archive.run.pk).update(resumed_at=sent_on)
            archive.run.refresh_from_db()
        archive.ingest()
    assert archive.run.round_s == pytest.approx(10)
    paces = MetricBlock.objects.get(run=archive.run, series="tokens_per_s", level=0)
    assert paces.count == 2  # of rounds 2 and 4
