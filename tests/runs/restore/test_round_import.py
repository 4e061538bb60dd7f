"""The closed rounds of an import: the same rows as live ingest, in a few statements per batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from diloco.protocol import keys
from runs.exceptions import ActionRefused
from runs.ingest.rounds import ingest_rounds
from runs.ingest.stores import store_for
from runs.metrics.changes import Changes
from runs.models import MetricBlock, Run
from runs.restore import round_import
from runs.restore.round_import import import_closed_rounds
from tests.matrix import matrix
from tests.runs.rows import rows
from tests.runs.run_harness import Bucket, Clock, incarnation

pytestmark = pytest.mark.django_db

COMPARED = ("Run", "Round", "Contribution", "MetricBlock", "Event")


class Log:
    """A run, its bucket, and both ways to store its rounds."""

    def __init__(self, run: Run, clock: Clock) -> None:
        self.run, self.now = run, clock()
        self.bucket = Bucket(store_for(run), wall_s=clock().timestamp())
        self.resumed: Sequence[datetime] = ()

    def write(self, rounds: range, replicas: Sequence[int] = (0, 1, 2)) -> None:
        for round in rounds:
            for replica in replicas:
                self.bucket.contribution(round, replica, norm=1.0 + replica + round)
            self.bucket.plan(round, replicas)
            self.bucket.commit(round, replicas)

    def import_rounds(self) -> None:
        import_closed_rounds(self.run, self.bucket.store, self.now, resumed=self.resumed)

    def ingest(self) -> None:
        store, changes = self.bucket.store, Changes()
        assert ingest_rounds(self.run, store, now=self.now, changes=changes, resumed=self.resumed)

    def forget(self) -> None:
        """Remove what either of them stored."""
        MetricBlock.objects.filter(run=self.run).delete()
        self.run.events.filter(kind__in=("refused", "round_void", "contribution_refused")).delete()
        self.run.rounds.all().delete()
        Run.objects.filter(pk=self.run.pk).update(
            next_round=1, tokens=0, committed_rounds=0, round_s=None, refused_records=0
        )
        self.run.refresh_from_db()

    def rows(self) -> dict[str, Any]:
        result = rows(self.run, but={"Event": {"at"}})
        return {name: result[name] for name in COMPARED}


@pytest.fixture
def log(make_run: Callable[..., Any], clock: Clock) -> Log:
    return Log(make_run(replicas=3), clock)


def write_every_outcome(log: Log) -> None:
    """Late, refused, void, unreadable, relaunched and foreign contributions."""
    bucket = log.bucket
    log.write(range(1, 22))
    bucket.plan(2, [0, 1])
    bucket.commit(2, [0, 1])
    bucket.plan(3, [0, 1], refused={2: "norm: expected finite, found inf\x00"})
    bucket.commit(3, [0, 1], loss=2.5)
    bucket.commit(4, [], void="payload of replica 1 is gone", void_replica=1, tokens_total=6000)
    bucket.store.put(keys.commit(5), b"no commit")
    bucket.store.put(keys.plan(6), b"no plan")
    bucket.store.put(keys.contribution_record(7, 1, incarnation(1)), b"no record")
    bucket.contribution(8, 0, seq=2, norm=9.0)
    bucket.contribution(9, 77)
    bucket.plan(9, [0, 77])
    bucket.store.delete([keys.plan(10)])
    bucket.store.put(keys.commit(11), bucket.store.get(keys.commit(12)))
    bucket.plan(13, [0], refused=dict.fromkeys(range(1, 40), "too slow"))
    bucket.commit(14, [0, 1, 2], tokens_total=0, wall_s=-1.0)
    for replica in (0, 1, 2):
        bucket.store.delete([keys.contribution_record(15, replica, incarnation(replica))])
    bucket.contribution(22, 0)  # of the open round
    log.resumed = [log.now + timedelta(seconds=8 * 17 - 1)]


@matrix("batch_rows", [1, 10, 10_000], fast=(10,))
def test_the_rows_are_those_of_live_ingest(
    log: Log, batch_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_import, "ROWS", batch_rows)
    write_every_outcome(log)
    log.ingest()
    log.run.rounds.filter(number=22).delete()
    expected = log.rows()
    assert {c["state"] for c in expected["Contribution"]} == {"included", "late", "refused"}
    assert {r["state"] for r in expected["Round"]} == {"committed", "void"}
    assert len(expected["Event"]) > 20
    log.forget()
    log.import_rounds()
    result = log.rows()
    for name in COMPARED:
        assert result[name] == expected[name], name


def test_the_statements_do_not_grow_with_the_rounds(log: Log) -> None:
    counts = []
    for rounds in (2, 40):
        log.write(range(1, rounds + 1))
        with CaptureQueriesContext(connection) as captured:
            log.import_rounds()
        counts.append(len(captured))
        assert log.run.next_round == rounds + 1
        log.forget()
    assert counts[1] <= counts[0] + 2  # the blocks of the second series


def test_a_batch_is_stored_when_it_has_enough_rows_of_any_kind(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[int] = []
    real = round_import._Log.store

    def store(self: Any) -> None:
        stored.append(len(self.batch.rounds))
        real(self)

    monkeypatch.setattr(round_import, "ROWS", 24)
    monkeypatch.setattr(round_import._Log, "store", store)
    log.write(range(1, 7))
    log.write(range(7, 9), replicas=())
    for round in (7, 8):
        log.bucket.plan(round, (), refused=dict.fromkeys(range(40), "too slow"))
    log.import_rounds()
    assert stored == [6, 1, 1, 0]  # 4 rows each; then a round, 3 contributions and 21 events each


def test_another_import_of_the_run_ends_this_one(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_import, "ROWS", 4)
    log.write(range(1, 5))
    real = round_import.insert_rows

    def insert(*arguments: Any) -> None:
        real(*arguments)
        Run.objects.filter(pk=log.run.pk).update(next_round=1)

    monkeypatch.setattr(round_import, "insert_rows", insert)
    with pytest.raises(ActionRefused, match="another import of the run has begun"):
        log.import_rounds()
    assert log.run.rounds.count() == 1
