"""Alert rules as a table of views and findings, and the alerts that the reconciler stores."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from runs.actions import lifecycle, replicas_and_pools
from runs.alerts import rules as alerts
from runs.alerts import store as alerting
from runs.alerts.alert_view import AlertView, ReplicaView, RoundsView
from runs.alerts.rules import Finding, RuleResult, apply_rules
from runs.models import Alert, Event
from runs.queries import selectors
from runs.reconcile.launch import launch_run
from runs.reconcile.reconciler import reconcile_run
from runs.states import ReplicaState, RunState
from tests.runs import run_harness as w


def replicas(*states: str, **more: Any) -> tuple[ReplicaView, ...]:
    return tuple(
        ReplicaView(number=n, state=ReplicaState(state), **more) for n, state in enumerate(states)
    )


def view(**changes: Any) -> AlertView:
    usual = {
        "state": RunState.RUNNING,
        "quorum": 2,
        "target": 3,
        "training": True,
        "replicas": replicas("computing", "waiting", "computing"),
        "total": 10,
    }
    return AlertView(**usual | changes)


def kinds(result: RuleResult) -> list[tuple[str, str]]:
    return [(f.kind, f.subject) for f in result.findings]


def losses(*values: float) -> RoundsView:
    return RoundsView(losses=tuple(enumerate(values, 1)))


def test_no_findings() -> None:
    assert apply_rules(view(rounds=losses(*[3.0] * 9))).findings == ()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"replicas": replicas("computing", "lost", "lost")},
            [("below_quorum", ""), ("replica_lost", "replica 1"), ("replica_lost", "replica 2")],
        ),
        (
            {"replicas": replicas("computing", "lost", "lost"), "training": False},
            [("replica_lost", "replica 1"), ("replica_lost", "replica 2")],
        ),
        ({"replicas": replicas("computing", "done", "evicted")}, []),
        (
            {"replicas": replicas("computing", "computing", "failed")},
            [("replica_lost", "replica 2")],
        ),
        ({"state": RunState.STALLED}, [("stalled", "")]),
        ({"state": RunState.PROVISIONING, "replicas": replicas("pending")}, []),
        ({"state": RunState.STOPPING, "replicas": replicas("draining")}, []),
        ({"state": RunState.PAUSED, "replicas": replicas("restarting")}, []),
        ({"budget_usd": 10.0, "cost_usd": 7.99}, []),
        ({"budget_usd": 10.0, "cost_usd": 8.0}, [("budget", "80 %")]),
        ({"budget_usd": 10.0, "cost_usd": 10.0}, [("budget", "80 %"), ("budget", "100 %")]),
        ({"cost_usd": 99.0}, []),
        ({"time_limit_s": 36_000, "age_s": 35_399.0}, []),
        ({"time_limit_s": 36_000, "age_s": 35_400.0}, [("deadline", "time limit")]),
        ({"time_limit_s": 100, "age_s": 91.0}, [("deadline", "time limit")]),
        (
            {"replicas": replicas(*["computing"] * 3, left_s=500.0, granted_s=86_400.0)},
            [("deadline", "replicas")],
        ),
        ({"replicas": replicas(*["computing"] * 3, left_s=700.0, granted_s=86_400.0)}, []),
        (
            {"replicas": replicas(*["computing"] * 3, nonfinite=True)},
            [("nan", f"replica {n}") for n in range(3)],
        ),
        ({"replicas": replicas(*["computing"] * 12, nonfinite=True)}, [("nan", "several")]),
        (
            {"replicas": replicas("computing", "computing", *["lost"] * 9)},
            [("replica_lost", "several")],
        ),
        ({"replicas": replicas("done", "done", "evicted", nonfinite=True)}, []),
        ({"rounds": RoundsView(goodput=0.49)}, [("goodput", "")]),
        ({"rounds": RoundsView(goodput=0.52)}, []),
        ({"rounds": RoundsView(goodput=0.52), "low_goodput": True}, [("goodput", "")]),
        ({"rounds": RoundsView(mismatch=(7,))}, [("weights_mismatch", "")]),
        (
            {"rounds": RoundsView(late=(frozenset({1}), frozenset({1, 2}), frozenset({1})))},
            [("staleness", "replica 1")],
        ),
        ({"rounds": RoundsView(late=(frozenset({1}), frozenset({1})))}, []),
        ({"rounds": RoundsView(late=(*[frozenset({1})] * 4, frozenset()))}, []),
        ({"rounds": RoundsView(late=(frozenset({9}),) * 3)}, []),
        ({"rounds": RoundsView(stale={2: 3})}, [("staleness", "replica 2")]),
        ({"rounds": RoundsView(stale={2: 2})}, []),
        ({"rounds": losses(3, 3, 3, 3, 3.7)}, [("spike", "")]),
        ({"rounds": losses(3, 3, 3, 3, 3.5)}, []),
    ],
)
def test_findings(changes: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert kinds(apply_rules(view(**changes))) == expected


@pytest.mark.parametrize(
    ("values", "spike"),
    [
        ([5.5, 4.0, 3.2, 2.9, 2.7, 2.6, 2.55, 2.5, 4.4], True),
        ([5.5, 4.0, 3.2, 2.9, 2.7, 2.6, 2.55, 2.5, 2.6], False),
        ([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 2.1], False),  # usual noise
        ([1.0, 1.0, 5.0], False),  # too few rounds
        ([1.0, 1.0, 1.0, 1.0, math.nan], False),  # covered by the alert about NaN
        ([1.0, math.nan, 1.0, 1.0, 1.0, 2.0], True),
        ([], False),
    ],
)
def test_spike_exceeds_the_usual_losses(values: list[float], spike: bool) -> None:
    assert (alerts.spike_of(values) is not None) == spike


@pytest.mark.parametrize(
    ("state", "level", "message"),
    [
        ("succeeded", "info", "succeeded: completed at round 10 (10 of 10 rounds)"),
        ("failed", "error", "failed: completed at round 10 (10 of 10 rounds)"),
        ("cancelled", "info", "cancelled: completed at round 10 (10 of 10 rounds)"),
    ],
)
def test_ended_run_has_only_the_finished_alert(state: str, level: str, message: str) -> None:
    over = view(
        state=RunState(state),
        reason="completed at round 10",
        committed=10,
        replicas=replicas("lost", nonfinite=True),
        budget_usd=1.0,
        cost_usd=2.0,
    )
    (finding,) = apply_rules(over).findings
    assert (finding.kind, finding.level, finding.message) == ("finished", level, message)


def test_undecided_alert_is_unchanged() -> None:
    result = apply_rules(view(replicas=replicas("computing", "restarting"), losses_read=False))
    for kind in ("spike", "staleness", "goodput", "weights_mismatch", "nan"):
        assert result.is_undecided(kind, "")
    assert result.is_undecided("replica_lost", "replica 1")
    assert not result.is_undecided("replica_lost", "replica 0")
    assert not result.is_undecided("below_quorum", "")
    assert not apply_rules(view(rounds=RoundsView())).is_undecided("spike", "")


# Stored alerts.

SPIKE = Finding(kind="spike", message="loss 9 in round 7")


def sync(run: Any, *findings: Finding, after_s: float = 0.0) -> list[Alert]:
    known = {(a.kind, a.subject): a for a in Alert.objects.filter(run=run, closed_at=None)}
    now = timezone.now() + timedelta(seconds=after_s)
    return alerting.sync(run, RuleResult(findings=findings), known, now=now)


def test_repeated_finding_has_one_row(make_run: Any, clock: Any) -> None:
    run = make_run()
    assert len(sync(run, SPIKE)) == 1
    assert sync(run, SPIKE) == []
    assert Alert.objects.get().closed_at is None
    assert sync(run) == []
    assert Alert.objects.get().closed_at == clock()
    assert Alert.objects.count() == 1


def test_open_alert_is_rewritten_only_for_another_limit(make_run: Any, clock: Any) -> None:
    run = make_run()

    def spent(usd: int, budget: int) -> Finding:
        limit = f" of ${budget}"
        return Finding(kind="budget", message=f"${usd}{limit}", limit=limit)

    for usd, budget, message in (
        (8, 10, "$8 of $10"),
        (9, 10, "$8 of $10"),
        (9, 11, "$9 of $11"),
    ):
        sync(run, spent(usd, budget))
        assert Alert.objects.get().message == message
    assert (Alert.objects.get().times, Alert.objects.get().opened_at) == (1, clock())


def test_flapping_alert_notifies_once(make_run: Any, clock: Any) -> None:
    run = make_run()
    notified = []
    for _ in range(5):
        notified += [a.notified_at == clock() for a in sync(run, SPIKE)]
        sync(run)
        clock.pass_s(60)
    assert notified == [True, False, False, False, False]
    alert = Alert.objects.get()
    assert alert.times == 5
    assert alert.first_at < alert.opened_at


def test_reopened_alert_notifies_after_the_clock_was_set_back(make_run: Any, clock: Any) -> None:
    run = make_run()
    sync(run, SPIKE)
    sync(run)
    clock.pass_s(-7200)
    [alert] = sync(run, SPIKE)
    assert (alert.notified_at, alert.times) == (clock(), 2)


def test_alert_reopened_later_notifies_again_and_is_unacknowledged(
    make_run: Any, clock: Any
) -> None:
    run = make_run()
    sync(run, SPIKE)
    assert alerting.acknowledge(Alert.objects.get(), actor=run.owner)
    sync(run)
    clock.pass_s(60)
    sync(run, SPIKE)
    assert Alert.objects.get().acknowledged_by == run.owner
    sync(run)
    clock.pass_s(alerting.COOL_DOWN.total_seconds())
    (again,) = sync(run, SPIKE)
    assert again.notified_at == clock()
    assert again.acknowledged_by is None


def test_two_workers_open_it_once(make_run: Any, clock: Any) -> None:
    run = make_run()
    sync(run, SPIKE)
    sync(run)
    clock.pass_s(1)
    stale = alerting.sync(run, RuleResult(findings=(SPIKE,)), {}, now=clock())
    late = alerting.sync(run, RuleResult(findings=(SPIKE,)), {}, now=clock())
    assert (len(stale), len(late)) == (1, 0)
    assert Alert.objects.get().times == 2


def test_an_acknowledgement_is_an_event_and_counts_once(make_run: Any, clock: Any) -> None:
    run = make_run()
    sync(run, SPIKE)
    alert = Alert.objects.get()
    assert [alerting.acknowledge(alert, actor=run.owner) for _ in range(2)] == [True, False]
    event = Event.objects.get(run=run, kind="alert")
    assert event.actor == run.owner
    assert event.message == "acknowledged: Loss spike: loss 9 in round 7"


# Through the reconciler.


def test_lost_replica_opens_an_alert_and_its_return_closes_it(make_harness: Any) -> None:
    harness = make_harness(min_quorum=2)
    harness.start()
    assert not Alert.objects.exists()
    harness.executor.end(harness.key(1), w.Cause.ERROR)
    harness.beat_all(but=(1,))
    harness.tick()
    result = {a.kind: a for a in Alert.objects.filter(closed_at=None)}
    assert set(result) >= {"replica_lost"}
    assert result["replica_lost"].replica == harness.replica(1)
    assert harness.deltas[-1]["run"]["alerts"] == len(result)
    for _ in range(3):
        harness.tick()
    assert Alert.objects.get(kind="replica_lost").times == 1
    harness.tick(after_s=120)
    harness.work()
    harness.beat_all()
    harness.tick()
    assert not Alert.objects.filter(kind="replica_lost", closed_at=None).exists()
    assert harness.deltas[-1]["run"]["alerts"] == 0


def open_kinds(run: Any) -> set[str]:
    return set(Alert.objects.filter(run=run, closed_at=None).values_list("kind", flat=True))


def test_loss_that_is_nan(make_harness: Any) -> None:
    harness = make_harness()
    harness.start()
    harness.bucket.segment(1, 1, losses=[3.0, math.nan])
    harness.tick()
    assert open_kinds(harness.run) == {"nan"}
    alert = Alert.objects.get(kind="nan")
    assert (alert.subject, alert.replica.number, alert.level) == ("replica 1", 1, "error")
    # Its next process starts.
    harness.bucket.beat(1, 1, "computing", seq=2)
    harness.tick()
    assert open_kinds(harness.run) == set()


@pytest.mark.slow
def test_rules_about_rounds_are_evaluated_on_commit(make_harness: Any) -> None:
    harness = make_harness(total_rounds=40)
    harness.start()
    bucket = harness.bucket
    slow = {"compute": 2.0, "wait": 6.0}
    for n in range(1, 7):
        for replica in (0, 1):
            bucket.contribution(n, replica)
        bucket.plan(n, [0])
        bucket.commit(n, [0])
        bucket.segment(0, n, rounds=(bucket.report(n, phases=slow),))
        late = bucket.report(n, outcome="late", phases=slow, weights_digest="e" * 64)
        bucket.segment(1, n, rounds=(late,))
        harness.beat_all()
        harness.tick()
        if n == 2:
            assert "goodput" not in open_kinds(harness.run)
    assert open_kinds(harness.run) == {"goodput", "staleness", "weights_mismatch"}
    assert Alert.objects.get(kind="staleness").subject == "replica 1"
    assert harness.events("alert") == [
        "Goodput is low: 25% of the last 5 rounds' time was compute, expected at least 50%"
    ]
    for n in range(7, 13):
        for replica in (0, 1):
            bucket.contribution(n, replica)
        bucket.plan(n, [0, 1])
        bucket.commit(n, [0, 1])
        for replica in (0, 1):
            bucket.segment(replica, n, rounds=(bucket.report(n),))
        harness.beat_all()
        harness.tick()
    assert open_kinds(harness.run) == set()


def test_limits_that_are_near(make_harness: Any) -> None:
    from runs.models import ReplicaAttempt, Run

    harness = make_harness(time_limit_s=1000)
    harness.start()
    Run.objects.update(budget_usd=10.0)
    ReplicaAttempt.objects.update(price_usd_h=45.0)
    harness.run.refresh_from_db()
    harness.beat_all()
    harness.tick(after_s=400)
    assert ("budget", "80 %") in Alert.objects.values_list("kind", "subject")
    harness.beat_all()
    harness.tick(after_s=520)
    assert ("deadline", "time limit") in Alert.objects.values_list("kind", "subject")


def test_end_notifies_once_and_closes_other_alerts(make_harness: Any) -> None:
    harness = make_harness()
    harness.start()
    harness.bucket.segment(1, 1, losses=[math.nan])
    harness.tick()
    harness.bucket.final(4)
    harness.beat_all("done")
    for number in (0, 1):
        harness.executor.end(harness.key(number), w.Cause.DONE, code=0)
    for _ in range(4):
        harness.tick()
    assert harness.run.state == "succeeded"
    assert open_kinds(harness.run) == set()
    end = Alert.objects.get(kind="finished")
    assert (end.times, end.closed_at, end.level) == (1, end.opened_at, "info")


def look_after() -> None:
    """Tick until no run needs control."""
    for _ in range(3):
        for pk in selectors.runs_to_reconcile().values_list("pk", flat=True):
            reconcile_run(str(pk))


@pytest.mark.parametrize("how", ["stopped", "by force", "never launched"])
def test_end_of_a_run_that_never_started_notifies(
    make_run: Any, executor: Any, tmp_path: Path, how: str
) -> None:
    """It ends in an HTTP request or a launch task, which evaluate no alert rules."""
    (tmp_path / "file").write_text("a file where a folder should be")
    run = make_run(rendezvous=f"{tmp_path}/file/run" if how == "never launched" else "")
    if how == "never launched":
        launch_run(str(run.pk))
    elif how == "stopped":
        replicas_and_pools.request_stop(run, actor=run.owner)
    else:
        lifecycle.force_stop(run, actor=run.owner)
    look_after()
    run.refresh_from_db()
    end = Alert.objects.get(run=run, kind="finished")
    assert run.ended
    assert end.message.startswith(f"{run.state}: {run.state_reason}")
    assert not selectors.runs_to_reconcile().exists()


def test_unchanged_alerts_add_no_queries(
    make_harness: Any, django_assert_max_num_queries: Any
) -> None:
    harness = make_harness(replicas=6)
    harness.start()
    for number in range(6):
        harness.bucket.segment(number, 1, losses=[math.nan])
    harness.tick()
    assert Alert.objects.filter(closed_at=None).count() == 6
    from runs.reconcile.context import ReconcileContext

    tick = ReconcileContext(
        run=harness.run,
        now=harness.clock(),
        attempts=[],
        replicas=list(harness.run.replicas.select_related("pool")),
    )
    with django_assert_max_num_queries(2):  # the alerts, and replicas with a NaN loss
        alerting.evaluate(tick)
    assert Alert.objects.filter(closed_at=None).count() == 6
