"""A run imported from its bucket equals the one in the database, row by row."""

from __future__ import annotations

import datetime
import io
from collections.abc import Callable
from typing import Any

import pytest
from django.apps import apps
from django.core.management import CommandError, call_command

from diloco.protocol import keys
from diloco.telemetry.compaction import pack_block
from executors.base import Cause
from runs.actions import lifecycle, replicas_and_pools
from runs.alerts.rules import KINDS
from runs.exceptions import ActionRefused
from runs.ingest import journal, journal_tables
from runs.metrics import round_strips
from runs.models import (
    Alert,
    Credential,
    Event,
    Journal,
    MetricBlock,
    ReplicaAttempt,
    Run,
    TelemetryCursor,
    Webhook,
    WebhookDelivery,
)
from runs.reconcile import retry_policy
from runs.restore import import_run as importing
from runs.restore.import_run import import_run
from runs.restore.journal_reader import read_journal
from tests.runs.rows import NOT_IMPORTED, ROWS, rows
from tests.runs.run_harness import incarnation, person

pytestmark = pytest.mark.django_db


def import_again(harness: Any, **options: Any) -> Any:
    """Delete the run's rows and import it."""
    Run.objects.filter(pk=harness.run.pk).delete()
    assert not MetricBlock.objects.exists()
    out = io.StringIO()
    call_command("import_run", harness.run.rendezvous, stdout=out, stderr=out, **options)
    harness.printed = out.getvalue()
    harness.run = Run.objects.get(pk=harness.run.pk)
    return harness.run


def run_rounds_and_failures(harness: Any) -> None:
    """Rounds, a late and a refused contribution, a relaunch, evaluations, a void round, notes."""
    bucket, run = harness.bucket, harness.run
    bucket.checkpoint(0)
    for n, first in ((1, 1), (2, 6)):
        for replica in (0, 1):
            bucket.segment(replica, n, losses=(3.0, 2.5, 2.75, 2.25, 2.0), first=first)
        harness.beat_all(step=first, round=1)
        harness.tick()
    for round in (1, 2):
        for replica in (0, 1):
            bucket.contribution(round, replica)
        bucket.plan(round, (0, 1))
        harness.tick()
        bucket.commit(round, (0, 1))
        for replica in (0, 1):
            bucket.segment(
                replica,
                round + 2,
                rounds=(bucket.report(round),),
                first=11,
                losses=(2.0, float("nan")),
                logs=(bucket.log(f"round {round} ✓"),),
                evaluations=(bucket.evaluation(round, 2.0 / round),) if replica else (),
            )
        harness.beat_all(round=round + 1)
        harness.tick()
    harness.executor.end(harness.key(1), Cause.ERROR, code=1, message="cuda: out of luck")
    harness.tick()
    harness.clock.pass_s(retry_policy.BACKOFF_CAP_S)
    harness.tick()
    harness.work()
    bucket.beat(1, 1, "syncing", seq=2)
    bucket.segment(1, 1, seq=2, losses=(1.5, 1.25), first=8)  # these steps once more
    used = {"gpu_busy": 0.5, "gpu_memory_bytes": 7e9}
    bucket.segment(0, 5, losses=(1.5,), first=13, system=used)
    bucket.store.put(keys.telemetry(1, incarnation(1, 2), 2), b"no segment")
    bucket.contribution(3, 0)
    bucket.plan(3, (0,), refused={1: "norm: expected finite, found inf"})
    bucket.commit(3, (0,), void="payload of replica 0 is gone", void_replica=0)
    bucket.checkpoint(2)
    bucket.contribution(4, 0)
    harness.tick()
    harness.clock.pass_s(5.0)
    bucket.plan(4, (0,))
    bucket.commit(4, (0,), wall_s=harness.clock().timestamp())  # while replica 1 catches up
    harness.tick()
    assert round_strips.healing(bytes(run.rounds.get(number=4).outcomes)) == [1]
    bucket.beat(1, 2, "computing", seq=2)
    bucket.contribution(5, 0)
    harness.tick()
    harness.tick()
    lifecycle.describe(run, notes="why we did it", tags=["baseline"], actor=run.owner)
    replicas_and_pools.scale_pool(run.pools.get(), 3, actor=run.owner)
    harness.tick()
    harness.work()


def end(harness: Any) -> None:
    replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    harness.tick()
    harness.bucket.final(2, "stopped")
    for attempt in ReplicaAttempt.objects.filter(replica__run=harness.run, ended_at=None):
        harness.executor.end(attempt.launch_key, Cause.DONE, code=0)
    for _ in range(4):
        harness.tick()
    assert harness.run.state == "cancelled"
    assert not TelemetryCursor.objects.filter(ended=False).exists()


@pytest.fixture(scope="module")
def lived(share_harness: Callable[..., Any]) -> Any:
    from runs.submit.run_draft import PoolDraft

    return share_harness(
        run_rounds_and_failures,
        replicas=2,
        pools=(PoolDraft(count=2, price_usd_h=36.0),),
        budget_usd=1e6,
    )


@pytest.fixture
def harness(lived: Any, copy_harness: Callable[..., Any]) -> Any:
    return copy_harness(lived)


def test_a_run_is_the_same_row_by_row(harness: Any) -> None:
    end(harness)
    before = rows(harness.run)
    filled = {name: len(found) for name, found in before.items() if "Evaluation" not in name}
    assert all(filled.values()), filled  # evaluations: test_import_evaluations
    assert harness.run.cost_usd > 0
    import_again(harness)
    after = rows(harness.run)
    for name in ROWS:
        assert after[name] == before[name], name
    assert "remark" not in harness.printed


def test_a_run_with_packed_telemetry_is_the_same(harness: Any) -> None:
    end(harness)
    before, store = rows(harness.run), harness.bucket.store
    segments = len(store.list("telemetry/"))
    for replica, last in ((0, 5), (1, 4)):
        assert pack_block(store, replica, incarnation(replica), range(1, last + 1))
    assert len(store.list("telemetry/")) == segments - 9 + 2
    import_again(harness)
    after = rows(harness.run)
    for name in ROWS:
        assert after[name] == before[name], name
    assert "remark" not in harness.printed


def test_every_column_is_compared_or_excluded_explicitly() -> None:
    """A new column must be in the journal or be read from other objects of the bucket."""
    left_out = {**{k: set(v) for k, v in importing.OWN_CLOCK.items()}}
    for name, columns in NOT_IMPORTED.items():
        left_out.setdefault(name, set()).update(columns)
    from_bucket = {
        "Run": {
            "id",
            "rendezvous",
            "group_settings",
            "workload",
            "group_fingerprint",
            "code_sha256",
            "model_hash",
            "committed_rounds",
            "tokens",
            "eval_loss",
            "eval_round",
            "round_s",
            "bytes_up",
            "requests",
            "bytes_down",
            "phase_s",
            "refused_records",
            "next_round",
            "next_command",
            "owner",
            "store_credential",
            "archive",
            "sweep",  # an own row of the database, with the owner's goal
            "notify",
            "end_due",
            "watched_round",  # past rounds send no notifications again
            "delete_requested_at",
            "delete_objects",  # a new request states it again
        },
        "ReplicaPool": {"id", "run", "added_by", "credential"},
        "Replica": {
            "id",
            "run",
            "pool",
            "incarnation",
            "beat_count",
            "beat_interval_s",
            "beat_state",
            "beat_message",
            "step",
            "tokens",
            "loss",
            "tokens_per_s",
            "wait_fraction",
            "device",
            "host",
            "pid",
            "gpu_busy",
            "gpu_memory_bytes",
            "up_bytes_per_s",
            "down_bytes_per_s",
        },
        "ReplicaAttempt": {"id", "replica"},
        "EvaluationPlan": {"id", "run", "credential", "created_by"},
        "Evaluation": {
            *("id", "run", "plan"),
            *("metrics", "tokens", "data_digest", "harness", "device"),  # in the result
        },
        "EvaluationAttempt": {"id", "evaluation"},
        "Alert": {"id", "run", "replica", "acknowledged_by"},
        "Event": {"id", "run", "replica", "actor"},
    }
    journalled = {
        table.model.__name__: set(table.columns)
        for table in (
            journal_tables.RUN,
            journal_tables.POOL,
            journal_tables.REPLICA,
            journal_tables.ATTEMPT,
            journal_tables.EVALUATION_PLAN,
            journal_tables.EVALUATION,
            journal_tables.EVALUATION_ATTEMPT,
            journal_tables.ALERT,
            journal_tables.EVENT,
        )
    }
    for name, columns in journalled.items():
        model = apps.get_model("runs", name)
        result = {field.name for field in model._meta.concrete_fields}
        assert result == {*columns, *from_bucket[name], *left_out.get(name, ())}, name


def test_a_live_run_continues_after_an_import(harness: Any) -> None:
    owed = {"ReplicaAttempt": {"cost_usd"}}  # of what runs: counted again, up to now
    before = rows(harness.run, but=owed)
    import_again(harness)
    assert harness.run.state == "degraded"
    after = rows(harness.run, but=owed)
    assert after["ReplicaAttempt"] == before["ReplicaAttempt"]
    assert after["Round"] == before["Round"]
    assert after["MetricBlock"] == before["MetricBlock"]
    events = Event.objects.count()
    harness.bucket.beat(0, 90, "computing")
    harness.bucket.beat(1, 90, "computing", seq=2)
    harness.bucket.beat(2, 90, "computing")
    harness.tick()
    harness.tick()
    assert [harness.replica(number).state for number in (0, 1)] == ["computing", "computing"]
    assert harness.executor.launches == 3  # nothing was launched twice
    harness.tick(6)  # a replica due for launch when the database was lost is launched now
    harness.work()
    for number, seq in ((0, 1), (1, 2), (2, 1)):
        harness.bucket.beat(number, 91, "computing", seq=seq)
    harness.tick()
    assert harness.run.state == "running"
    assert Event.objects.count() > events
    replicas_and_pools.request_stop(harness.run, actor=harness.run.owner)
    harness.tick()
    assert harness.bucket.store.get(keys.control(harness.run.next_command - 1))
    end_state = [a.launch_key for a in ReplicaAttempt.objects.filter(ended_at=None)]
    assert len(end_state) == 3


def test_a_waiting_replica_and_the_cost_of_its_attempt_are_imported(harness: Any) -> None:
    """The cost of a job suspended by its queue was lost by an import, and its wait restarted."""
    since = harness.clock() - datetime.timedelta(seconds=90)
    waiting = {"pending_cause": "capacity", "pending_since": since, "waiting_since": since}
    harness.run.replicas.filter(number=1).update(**waiting)
    attempts = ReplicaAttempt.objects.filter(replica__run=harness.run, replica__number=1)
    attempts.filter(ended_at=None).update(earlier_cost_usd=12.5)
    mia = person("mia", "admin")
    harness.run.pools.update(added_by=mia)
    journal.write_journal(harness.run, harness.bucket.store, now=harness.clock())
    import_again(harness)
    [result] = harness.run.replicas.filter(number=1).values(*waiting)
    assert result == waiting
    assert attempts.get(ended_at=None).cost_usd >= 12.5
    assert harness.run.pools.get().added_by is None
    assert "was added by 'mia'; it runs with the permissions of the run's owner" in harness.printed
    end(harness)
    harness.run.replicas.filter(number=1).update(pending_cause="a new one")
    journal.write_journal(harness.run, harness.bucket.store, now=harness.clock())
    with pytest.raises(CommandError, match="pending_cause: expected one of"):
        import_again(harness)


def test_an_open_alert_is_not_notified_again(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.tick()
    reported = set(Alert.objects.values_list("kind", "subject", "times", "closed_at"))
    open_ones = {row[:2] for row in reported if row[3] is None}
    assert open_ones
    hooks = [
        Webhook.objects.create(
            name=name, url="https://example.org", kinds=list(KINDS), created_at=harness.clock()
        )
        for name in ("pager", "chat")
    ]
    Run.objects.update(notify=[hook.pk for hook in hooks])
    lifecycle.describe(harness.run, notes="news for the journal", tags=[], actor=harness.run.owner)
    harness.tick()
    hooks[0].delete()
    import_again(harness)
    assert harness.run.notify == [hooks[1].pk]
    assert "there is no webhook pager" in harness.printed
    assert set(Alert.objects.values_list("kind", "subject", "times", "closed_at")) == reported
    harness.tick()
    assert not WebhookDelivery.objects.filter(kind__in={kind for kind, _ in open_ones}).exists()
    opened = Alert.objects.filter(closed_at=None)
    assert {(a.kind, a.subject) for a in opened} >= open_ones
    assert {a.times for a in opened} == {1}


@pytest.mark.slow
def test_an_import_of_an_import_is_the_same(harness: Any) -> None:
    end(harness)
    before = rows(harness.run)
    import_again(harness)
    lifecycle.describe(harness.run, notes="found again", tags=[], actor=harness.run.owner)
    harness.tick()
    assert not Journal.objects.get(run=harness.run).due
    import_again(harness)
    after = rows(harness.run)
    assert harness.run.notes == "found again"
    assert len(after["Event"]) == len(before["Event"]) + 1


def test_the_journal_is_written_when_something_changed_and_only_then(harness: Any) -> None:
    def objects() -> int:
        return len(harness.bucket.store.list(keys.JOURNAL))

    end(harness)
    written = objects()
    for _ in range(3):
        harness.tick()
    assert objects() == written
    lifecycle.archive(harness.run, actor=harness.run.owner)
    harness.tick()
    harness.tick()
    assert objects() == written + 1
    last = read_journal(harness.bucket.store)
    assert last.run["archived_at"]
    assert last.events[-1]["kind"] == "archived"


def test_heartbeats_alone_write_no_journal(make_harness: Callable[..., Any]) -> None:
    harness = make_harness(replicas=2)
    harness.bucket.segment(0, 1, losses=(3.0,))
    harness.start()
    harness.beat_all("uploading")
    harness.tick()
    written = len(harness.bucket.store.list(keys.JOURNAL))
    for state in ("waiting", "applying", "computing", "uploading"):
        harness.beat_all(state)
        harness.tick()
    assert len(harness.bucket.store.list(keys.JOURNAL)) == written


def test_an_entry_written_twice_is_read_once(harness: Any) -> None:
    end(harness)
    reported = read_journal(harness.bucket.store)
    Journal.objects.all().delete()
    harness.tick()
    again = read_journal(harness.bucket.store)
    assert again.next_n > reported.next_n
    assert again.events == reported.events
    assert again.run == reported.run


def test_an_unreadable_object_is_reported_and_skipped(harness: Any) -> None:
    end(harness)
    n = Journal.objects.get(run=harness.run).next_n
    harness.bucket.store.create(keys.journal(n), b'{"format": "something else"}')
    harness.bucket.store.create(keys.journal(n + 1), b"[]")
    import_again(harness)
    assert harness.printed.count("remark: not read: control/journal/") == 2
    assert harness.run.state == "cancelled"


def test_an_invalid_value_ends_the_import(harness: Any) -> None:
    end(harness)
    n = Journal.objects.get(run=harness.run).next_n
    at = "2030-01-01T00:00:00+00:00"
    wrong = {"owner": "olga", "name": "a", "state": "glorious", "state_since": at, "created_at": at}
    entry = journal.Entry(n=n, wall_s=0.0, run=wrong)
    harness.bucket.store.create(keys.journal(n), entry.to_bytes())
    with pytest.raises(CommandError, match="Run state: Value 'glorious' is not a valid choice"):
        import_again(harness)
    # Rows of the failed import do not prevent a second one.
    harness.bucket.store.delete([keys.journal(n)])
    assert import_run(harness.run.rendezvous).run.state == "cancelled"


def test_an_existing_run_is_not_imported(harness: Any) -> None:
    with pytest.raises(
        ActionRefused, match="expected a run that is not here yet, found 'Test run'"
    ):
        import_run(harness.run.rendezvous)


def test_a_missing_owner_must_be_given(harness: Any) -> None:
    end(harness)
    Run.objects.all().delete()
    harness.run.owner.delete()
    with pytest.raises(ActionRefused, match="the journal names 'olga'"):
        import_run(harness.run.rendezvous)
    mia = person("mia", "operator")
    import_again(harness, owner="mia")
    assert harness.run.owner == mia
    assert "events by olga, who are not users here" in harness.printed
    with pytest.raises(CommandError, match="found none named 'zoe'"):
        call_command("import_run", harness.run.rendezvous, owner="zoe")


def test_a_location_without_a_group_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ActionRefused, match=r"expected group\.json"):
        import_run(tmp_path.as_uri())
    with pytest.raises(ActionRefused, match="found none 'lost'"):
        import_run(tmp_path.as_uri(), credential="lost")
    assert not Credential.objects.exists()


def test_a_group_without_a_control_plane_is_shown(tmp_path: Any) -> None:
    """Created by ``python -m diloco.init``: no journal, no attempts, no owner."""
    from diloco.init import create_group
    from diloco.protocol.settings import GroupSettings
    from diloco.store.open import open_store
    from tests.runs.run_harness import Bucket

    document = create_group(str(tmp_path), GroupSettings(num_replicas=2), name="by hand")
    bucket = Bucket(open_store(str(tmp_path)))
    for replica in (0, 1):
        bucket.beat(replica, 5, "done")
        bucket.segment(replica, 1, losses=(3.0, 2.0))
    bucket.plan(1, (0, 1))
    bucket.commit(1, (0, 1))
    bucket.final(1)
    with pytest.raises(ActionRefused, match="the bucket names none; name one"):
        import_run(str(tmp_path))
    run = import_run(str(tmp_path), owner=person("olga", "operator")).run
    assert (run.name, run.state, run.committed_rounds) == ("by hand", "succeeded", 1)
    assert run.group_fingerprint == document.fingerprint
    assert [(p.backend, p.count) for p in run.pools.all()] == [("external", 2)]
    assert [r.step for r in run.replicas.order_by("number")] == [2, 2]
    assert run not in importing.Run.objects.filter(state__in=("running", "queued"))


def test_rows_of_a_killed_import_are_removed_after_a_day(
    make_harness: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process cannot clean up."""
    harness = make_harness(replicas=1)
    Run.objects.filter(pk=harness.run.pk).update(
        state="cancelled", state_reason=importing.IMPORTING, state_since=harness.clock()
    )
    assert importing.remove_abandoned(harness.clock()) == 0
    harness.clock.pass_s(25 * 3600)
    assert importing.remove_abandoned(harness.clock()) == 1
    assert not Run.objects.filter(pk=harness.run.pk).exists()


def keys_of(table: journal_tables.Table) -> set[str]:
    return {journal_tables.STORED_AS.get(name, name) for name in table.columns}


def test_the_keys_of_journal_bodies_are_stable() -> None:
    """Journals of existing buckets are read by these names: a renamed column must keep its key."""
    assert keys_of(journal_tables.POOL) == {
        *("backend", "hardware", "count", "region", "spot", "image", "timeout_s", "options"),
        *("price_usd_h", "price_given", "max_price_usd_h", "held", "failures", "closed_until"),
        *("needs_person", "trouble", "held_by"),
    }
    assert keys_of(journal_tables.ATTEMPT) == {
        *("number", "launch_key", "handle", "cause", "exit_code", "message", "created_at"),
        *("launched_at", "started_at", "deadline_at", "expires_at", "ended_at", "price_usd_h"),
        *("earlier_cost_usd", "cost_usd", "billed_s"),
    }
    assert keys_of(journal_tables.EVALUATION_PLAN) == {
        *("name", "spec", "every", "backend", "hardware", "timeout_s", "max_attempts", "enabled"),
        "created_at",
    }
    assert keys_of(journal_tables.EVALUATION) == {
        *("round", "state", "message", "failures", "created_at", "retrying_since", "ended_at"),
    }
    assert keys_of(journal_tables.EVALUATION_ATTEMPT) == {
        *("number", "launch_key", "handle", "cause", "exit_code", "message", "created_at"),
        *("launched_at", "started_at", "ended_at", "price_usd_h", "cost_usd"),
    }
    assert keys_of(journal_tables.ALERT) == {
        *("kind", "subject", "level", "message", "first_at", "opened_at", "closed_at", "times"),
        *("told_at", "acknowledged_at"),
    }
    assert keys_of(journal_tables.EVENT) == {
        *("at", "level", "kind", "from_state", "to_state", "message"),
    }
