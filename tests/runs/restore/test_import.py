"""A run out of its bucket alone is the run that was in the database, row by row."""

from __future__ import annotations

import datetime
import io
from collections.abc import Callable
from typing import Any

import pytest
from django.apps import apps
from django.core.management import CommandError, call_command

from diloco.protocol import keys
from executors.base import Cause
from runs.actions import lifecycle, replicas_and_pools
from runs.alerts.rules import KINDS
from runs.exceptions import CannotDo
from runs.ingest import journal
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
from tests.runs.rows import IDS, ROWS, rows
from tests.runs.world import incarnation, person

pytestmark = pytest.mark.django_db


def import_again(world: Any, **options: Any) -> Any:
    """Lose the run and read it back."""
    Run.objects.filter(pk=world.run.pk).delete()
    assert not MetricBlock.objects.exists()
    out = io.StringIO()
    call_command("import_run", world.run.rendezvous, stdout=out, stderr=out, **options)
    world.said = out.getvalue()
    world.run = Run.objects.get(pk=world.run.pk)
    return world.run


def lead_a_life(world: Any) -> None:
    """Rounds, a late and a refused contribution, a relaunch, evaluations, a void round, notes."""
    bucket, run = world.bucket, world.run
    bucket.checkpoint(0)
    for n, first in ((1, 1), (2, 6)):
        for replica in (0, 1):
            bucket.segment(replica, n, losses=(3.0, 2.5, 2.75, 2.25, 2.0), first=first)
        world.beat_all(step=first, round=1)
        world.tick()
    for round in (1, 2):
        for replica in (0, 1):
            bucket.contribution(round, replica)
        bucket.plan(round, (0, 1))
        world.tick()
        bucket.commit(round, (0, 1))
        for replica in (0, 1):
            bucket.segment(
                replica, round + 2, rounds=(bucket.report(round),), first=11,
                losses=(2.0, float("nan")), logs=(bucket.log(f"round {round} ✓"),),
                evaluations=(bucket.evaluation(round, 2.0 / round),) if replica else (),
            )  # fmt: skip
        world.beat_all(round=round + 1)
        world.tick()
    world.executor.end(world.key(1), Cause.ERROR, code=1, said="cuda: out of luck")
    world.tick()
    world.clock.pass_s(retry_policy.BACKOFF_CAP_S)
    world.tick()
    world.work()
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
    world.tick()
    world.clock.pass_s(5.0)
    bucket.plan(4, (0,))
    bucket.commit(4, (0,), wall_s=world.clock().timestamp())  # while replica 1 catches up
    world.tick()
    assert round_strips.healing(bytes(run.rounds.get(number=4).outcomes)) == [1]
    bucket.beat(1, 2, "computing", seq=2)
    bucket.contribution(5, 0)
    world.tick()
    world.tick()
    lifecycle.describe(run, notes="why we did it", tags=["baseline"], actor=run.owner)
    replicas_and_pools.scale_pool(run.pools.get(), 3, actor=run.owner)
    world.tick()
    world.work()


def end(world: Any) -> None:
    replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    world.tick()
    world.bucket.final(2, "stopped")
    for attempt in ReplicaAttempt.objects.filter(replica__run=world.run, ended_at=None):
        world.executor.end(attempt.launch_key, Cause.DONE, code=0)
    for _ in range(4):
        world.tick()
    assert world.run.state == "cancelled"
    assert not TelemetryCursor.objects.filter(ended=False).exists()


@pytest.fixture
def world(make_world: Callable[..., Any]) -> Any:
    from runs.submit.run_draft import PoolDraft

    made = make_world(replicas=2, pools=(PoolDraft(count=2, price_usd_h=36.0),), budget_usd=1e6)
    lead_a_life(made)
    return made


def test_a_run_is_the_same_row_by_row(world: Any) -> None:
    end(world)
    before = rows(world.run)
    assert all(before.values()), {name: len(found) for name, found in before.items()}
    assert world.run.cost_usd > 0
    import_again(world)
    after = rows(world.run)
    for name in ROWS:
        assert after[name] == before[name], name
    assert "remark" not in world.said


def test_every_column_is_compared_or_said_to_be_left_out() -> None:
    """A column that somebody adds must be told in the journal or be found in the bucket."""
    left_out = {**{k: set(v) for k, v in importing.OWN_CLOCK.items()}}
    for name, columns in IDS.items():
        left_out.setdefault(name, set()).update(columns)
    from_bucket = {
        "Run": {
            "id", "rendezvous", "group_settings", "workload", "group_fingerprint", "code_sha256",
            "model_hash", "committed_rounds", "tokens", "eval_loss", "eval_round", "round_s",
            "bytes_up", "bytes_down", "phase_s", "refused_records", "next_round", "next_command",
            "owner", "store_credential", "archive", "notify",
            "end_due", "watched_round",  # what was is not told once more
            "delete_requested_at", "delete_objects",  # whoever deletes it does so anew
        },
        "ReplicaPool": {"id", "run", "added_by", "credential"},
        "Replica": {
            "id", "run", "pool", "incarnation", "beat_count", "beat_interval_s",
            "beat_state", "beat_message", "step", "tokens", "loss", "tokens_per_s",
            "wait_fraction", "device", "host", "pid", "gpu_busy",
            "gpu_memory_bytes", "up_bytes_per_s", "down_bytes_per_s",
        },
        "ReplicaAttempt": {"id", "replica"},
        "Alert": {"id", "run", "replica", "acknowledged_by"},
        "Event": {"id", "run", "replica", "actor"},
    }  # fmt: skip
    told = {
        "Run": (*journal.RUN, *journal.WHEN_NOT_LIVE),
        "ReplicaPool": journal.POOL,
        "Replica": (*journal.REPLICA, *journal.WHEN_NOT_WORKING),
        "ReplicaAttempt": (*journal.ATTEMPT, *journal.WHEN_ENDED),
        "Alert": journal.ALERT,
        "Event": journal.EVENT,
    }
    for name, columns in told.items():
        model = apps.get_model("runs", name)
        found = {field.name for field in model._meta.concrete_fields}
        assert found == {*columns, *from_bucket[name], *left_out.get(name, ())}, name


def test_a_run_that_is_live_goes_on_after_an_import(world: Any) -> None:
    owed = {"ReplicaAttempt": {"cost_usd"}}  # of what runs: counted again, up to now
    before = rows(world.run, but=owed)
    import_again(world)
    assert world.run.state == "degraded"
    after = rows(world.run, but=owed)
    assert after["ReplicaAttempt"] == before["ReplicaAttempt"]
    assert after["Round"] == before["Round"]
    assert after["MetricBlock"] == before["MetricBlock"]
    events = Event.objects.count()
    world.bucket.beat(0, 90, "computing")
    world.bucket.beat(1, 90, "computing", seq=2)
    world.bucket.beat(2, 90, "computing")
    world.tick()
    world.tick()
    assert [world.replica(number).state for number in (0, 1)] == ["computing", "computing"]
    assert world.executor.launches == 3  # nothing was launched twice
    world.tick(6)  # whoever was to be launched when the database was lost is launched now
    world.work()
    for number, seq in ((0, 1), (1, 2), (2, 1)):
        world.bucket.beat(number, 91, "computing", seq=seq)
    world.tick()
    assert world.run.state == "running"
    assert Event.objects.count() > events
    replicas_and_pools.request_stop(world.run, actor=world.run.owner)
    world.tick()
    assert world.bucket.store.get(keys.control(world.run.next_command - 1))
    end_state = [a.launch_key for a in ReplicaAttempt.objects.filter(ended_at=None)]
    assert len(end_state) == 3


def test_a_replica_that_waits_and_what_its_attempt_has_cost_are_imported(world: Any) -> None:
    """A job that its queue had suspended cost nothing after an import, and waited anew."""
    since = world.clock() - datetime.timedelta(seconds=90)
    waiting = {"pending_cause": "capacity", "pending_since": since, "waiting_since": since}
    world.run.replicas.filter(number=1).update(**waiting)
    attempts = ReplicaAttempt.objects.filter(replica__run=world.run, replica__number=1)
    attempts.filter(ended_at=None).update(earlier_cost_usd=12.5)
    mia = person("mia", "admin")
    world.run.pools.update(added_by=mia)
    journal.write_journal(world.run, world.bucket.store, now=world.clock())
    import_again(world)
    [found] = world.run.replicas.filter(number=1).values(*waiting)
    assert found == waiting
    assert attempts.get(ended_at=None).cost_usd >= 12.5
    assert world.run.pools.get().added_by is None
    assert "was added by 'mia'; it runs with the permissions of the run's owner" in world.said
    end(world)
    world.run.replicas.filter(number=1).update(pending_cause="a new one")
    journal.write_journal(world.run, world.bucket.store, now=world.clock())
    with pytest.raises(CommandError, match="pending_cause: expected one of"):
        import_again(world)


def test_an_alert_that_is_open_is_not_told_of_once_more(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.tick()
    told = set(Alert.objects.values_list("kind", "subject", "times", "closed_at"))
    open_ones = {row[:2] for row in told if row[3] is None}
    assert open_ones
    hooks = [
        Webhook.objects.create(
            name=name, url="https://example.org", kinds=list(KINDS), created_at=world.clock()
        )
        for name in ("pager", "chat")
    ]
    Run.objects.update(notify=[hook.pk for hook in hooks])
    lifecycle.describe(world.run, notes="news for the journal", tags=[], actor=world.run.owner)
    world.tick()
    hooks[0].delete()
    import_again(world)
    assert world.run.notify == [hooks[1].pk]
    assert "there is no webhook pager" in world.said
    assert set(Alert.objects.values_list("kind", "subject", "times", "closed_at")) == told
    world.tick()
    assert not WebhookDelivery.objects.filter(kind__in={kind for kind, _ in open_ones}).exists()
    opened = Alert.objects.filter(closed_at=None)
    assert {(a.kind, a.subject) for a in opened} >= open_ones
    assert {a.times for a in opened} == {1}


def test_an_import_of_an_import_is_the_same(world: Any) -> None:
    end(world)
    before = rows(world.run)
    import_again(world)
    lifecycle.describe(world.run, notes="found again", tags=[], actor=world.run.owner)
    world.tick()
    assert not Journal.objects.get(run=world.run).due
    import_again(world)
    after = rows(world.run)
    assert world.run.notes == "found again"
    assert len(after["Event"]) == len(before["Event"]) + 1


def test_the_journal_is_written_when_something_changed_and_only_then(world: Any) -> None:
    def objects() -> int:
        return len(world.bucket.store.list(keys.JOURNAL))

    end(world)
    written = objects()
    for _ in range(3):
        world.tick()
    assert objects() == written
    lifecycle.archive(world.run, actor=world.run.owner)
    world.tick()
    world.tick()
    assert objects() == written + 1
    last = read_journal(world.bucket.store)
    assert last.run["archived_at"]
    assert last.events[-1]["kind"] == "archived"


def test_beats_alone_make_no_journal(make_world: Callable[..., Any]) -> None:
    world = make_world(replicas=2)
    world.bucket.segment(0, 1, losses=(3.0,))
    world.start()
    world.beat_all("uploading")
    world.tick()
    written = len(world.bucket.store.list(keys.JOURNAL))
    for state in ("waiting", "applying", "computing", "uploading"):
        world.beat_all(state)
        world.tick()
    assert len(world.bucket.store.list(keys.JOURNAL)) == written


def test_who_died_before_remembering_what_it_wrote_tells_it_once(world: Any) -> None:
    end(world)
    told = read_journal(world.bucket.store)
    Journal.objects.all().delete()
    world.tick()
    again = read_journal(world.bucket.store)
    assert again.next_n > told.next_n
    assert again.events == told.events
    assert again.run == told.run


def test_an_object_that_cannot_be_read_is_named_and_passed_over(world: Any) -> None:
    end(world)
    n = Journal.objects.get(run=world.run).next_n
    world.bucket.store.create(keys.journal(n), b'{"format": "something else"}')
    world.bucket.store.create(keys.journal(n + 1), b"[]")
    import_again(world)
    assert world.said.count("remark: not read: control/journal/") == 2
    assert world.run.state == "cancelled"


def test_a_value_no_column_takes_ends_the_import(world: Any) -> None:
    end(world)
    n = Journal.objects.get(run=world.run).next_n
    at = "2030-01-01T00:00:00+00:00"
    wrong = {
        "owner": "olga", "name": "a", "state": "glorious", "state_since": at, "created_at": at
    }  # fmt: skip
    entry = journal.Entry(n=n, wall_s=0.0, run=wrong)
    world.bucket.store.create(keys.journal(n), entry.to_bytes())
    with pytest.raises(CommandError, match="Run state: Value 'glorious' is not a valid choice"):
        import_again(world)
    # The half of it that is there does not stand in the way of a second try.
    world.bucket.store.delete([keys.journal(n)])
    assert import_run(world.run.rendezvous).run.state == "cancelled"


def test_a_run_that_is_here_is_not_imported(world: Any) -> None:
    with pytest.raises(CannotDo, match="expected a run that is not here yet, found 'Test run'"):
        import_run(world.run.rendezvous)


def test_an_owner_who_is_gone_must_be_named(world: Any) -> None:
    end(world)
    Run.objects.all().delete()
    world.run.owner.delete()
    with pytest.raises(CannotDo, match="the journal says 'olga'"):
        import_run(world.run.rendezvous)
    mia = person("mia", "operator")
    import_again(world, owner="mia")
    assert world.run.owner == mia
    assert "events by olga, who are no users here" in world.said
    with pytest.raises(CommandError, match="found none of name 'nobody'"):
        call_command("import_run", world.run.rendezvous, owner="nobody")


def test_a_place_without_a_group_is_none(tmp_path: Any) -> None:
    with pytest.raises(CannotDo, match=r"expected group\.json"):
        import_run(tmp_path.as_uri())
    with pytest.raises(CannotDo, match="found none 'lost'"):
        import_run(tmp_path.as_uri(), credential="lost")
    assert not Credential.objects.exists()


def test_a_group_without_a_control_plane_is_shown(tmp_path: Any) -> None:
    """Made by ``python -m diloco.init``: no journal, no attempts, nobody's run."""
    from diloco.init import create_group
    from diloco.protocol.settings import GroupSettings
    from diloco.store.open import open_store
    from tests.runs.world import Bucket

    document = create_group(str(tmp_path), GroupSettings(num_replicas=2), name="by hand")
    bucket = Bucket(open_store(str(tmp_path)))
    for replica in (0, 1):
        bucket.beat(replica, 5, "done")
        bucket.segment(replica, 1, losses=(3.0, 2.0))
    bucket.plan(1, (0, 1))
    bucket.commit(1, (0, 1))
    bucket.final(1)
    with pytest.raises(CannotDo, match="the bucket says none; name one"):
        import_run(str(tmp_path))
    run = import_run(str(tmp_path), owner=person("olga", "operator")).run
    assert (run.name, run.state, run.committed_rounds) == ("by hand", "succeeded", 1)
    assert run.group_fingerprint == document.fingerprint
    assert [(p.backend, p.count) for p in run.pools.all()] == [("external", 2)]
    assert [r.step for r in run.replicas.order_by("number")] == [2, 2]
    assert run not in importing.Run.objects.filter(state__in=("running", "queued"))


def test_what_a_killed_import_left_is_removed_after_a_day(
    make_world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill -9 leaves no process that could clean up."""
    world = make_world(replicas=1)
    Run.objects.filter(pk=world.run.pk).update(
        state="cancelled", state_reason=importing.IMPORTING, state_since=world.clock()
    )
    assert importing.remove_abandoned(world.clock()) == 0
    world.clock.pass_s(25 * 3600)
    assert importing.remove_abandoned(world.clock()) == 1
    assert not Run.objects.filter(pk=world.run.pk).exists()
