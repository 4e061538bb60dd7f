"""What is an alert: a table of views and findings, and what the reconciler keeps of them."""

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
from runs.alerts.rules import AlertView, Finding, ReplicaView, RoundsView, Verdict, judge
from runs.models import Alert, Event
from runs.queries import selectors
from runs.reconcile.launch import launch_run
from runs.reconcile.reconciler import reconcile_run
from runs.states import ReplicaState, RunState
from tests.runs import world as w


def replicas(*states: str, **more: Any) -> tuple[ReplicaView, ...]:
    return tuple(
        ReplicaView(number=n, state=ReplicaState(state), **more) for n, state in enumerate(states)
    )


def view(**changes: Any) -> AlertView:
    usual = {
        "state": RunState.RUNNING, "quorum": 2, "target": 3, "training": True,
        "replicas": replicas("computing", "waiting", "computing"), "total": 10,
    }  # fmt: skip
    return AlertView(**usual | changes)


def kinds(verdict: Verdict) -> list[tuple[str, str]]:
    return [(f.kind, f.subject) for f in verdict.findings]


def losses(*values: float) -> RoundsView:
    return RoundsView(losses=tuple(enumerate(values, 1)))


def test_nothing_is_wrong() -> None:
    assert judge(view(rounds=losses(*[3.0] * 9))).findings == ()


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"replicas": replicas("computing", "lost", "lost")},
         [("below_quorum", ""), ("replica_lost", "replica 1"), ("replica_lost", "replica 2")]),
        ({"replicas": replicas("computing", "lost", "lost"), "training": False},
         [("replica_lost", "replica 1"), ("replica_lost", "replica 2")]),
        ({"replicas": replicas("computing", "done", "evicted")}, []),
        ({"replicas": replicas("computing", "computing", "failed")},
         [("replica_lost", "replica 2")]),
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
        ({"replicas": replicas(*["computing"] * 3, left_s=500.0, granted_s=86_400.0)},
         [("deadline", "replicas")]),
        ({"replicas": replicas(*["computing"] * 3, left_s=700.0, granted_s=86_400.0)}, []),
        ({"replicas": replicas(*["computing"] * 3, nonfinite=True)},
         [("nan", f"replica {n}") for n in range(3)]),
        ({"replicas": replicas(*["computing"] * 12, nonfinite=True)}, [("nan", "several")]),
        ({"replicas": replicas("computing", "computing", *["lost"] * 9)},
         [("replica_lost", "several")]),
        ({"replicas": replicas("done", "done", "evicted", nonfinite=True)}, []),
        ({"rounds": RoundsView(goodput=0.49)}, [("goodput", "")]),
        ({"rounds": RoundsView(goodput=0.52)}, []),
        ({"rounds": RoundsView(goodput=0.52), "low_goodput": True}, [("goodput", "")]),
        ({"rounds": RoundsView(mismatch=(7,))}, [("weights_mismatch", "")]),
        ({"rounds": RoundsView(late=(frozenset({1}), frozenset({1, 2}), frozenset({1})))},
         [("staleness", "replica 1")]),
        ({"rounds": RoundsView(late=(frozenset({1}), frozenset({1})))}, []),
        ({"rounds": RoundsView(late=(*[frozenset({1})] * 4, frozenset()))}, []),
        ({"rounds": RoundsView(late=(frozenset({9}),) * 3)}, []),
        ({"rounds": RoundsView(stale={2: 3})}, [("staleness", "replica 2")]),
        ({"rounds": RoundsView(stale={2: 2})}, []),
        ({"rounds": losses(3, 3, 3, 3, 3.7)}, [("spike", "")]),
        ({"rounds": losses(3, 3, 3, 3, 3.5)}, []),
    ],
)  # fmt: skip
def test_what_is_the_case(changes: dict[str, Any], found: list[tuple[str, str]]) -> None:
    assert kinds(judge(view(**changes))) == found


@pytest.mark.parametrize(
    ("values", "spike"),
    [
        ([5.5, 4.0, 3.2, 2.9, 2.7, 2.6, 2.55, 2.5, 4.4], True),
        ([5.5, 4.0, 3.2, 2.9, 2.7, 2.6, 2.55, 2.5, 2.6], False),
        ([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 2.1], False),  # it is always like that
        ([1.0, 1.0, 5.0], False),  # too early to tell
        ([1.0, 1.0, 1.0, 1.0, math.nan], False),  # another alert's
        ([1.0, math.nan, 1.0, 1.0, 1.0, 2.0], True),
        ([], False),
    ],
)
def test_a_spike_stands_out_of_what_is_usual(values: list[float], spike: bool) -> None:
    assert (alerts.spike_of(values) is not None) == spike


@pytest.mark.parametrize(
    ("state", "level", "words"),
    [
        ("succeeded", "info", "succeeded: completed at round 10 (10 of 10 rounds)"),
        ("failed", "error", "failed: completed at round 10 (10 of 10 rounds)"),
        ("cancelled", "info", "cancelled: completed at round 10 (10 of 10 rounds)"),
    ],
)
def test_an_end_is_all_that_is_said_of_a_run_that_is_over(
    state: str, level: str, words: str
) -> None:
    over = view(
        state=RunState(state), reason="completed at round 10", committed=10,
        replicas=replicas("lost", nonfinite=True), budget_usd=1.0, cost_usd=2.0,
    )  # fmt: skip
    (finding,) = judge(over).findings
    assert (finding.kind, finding.level, finding.message) == ("finished", level, words)


def test_what_cannot_be_said_stays_as_it_is() -> None:
    verdict = judge(view(replicas=replicas("computing", "restarting"), losses_read=False))
    for kind in ("spike", "staleness", "goodput", "weights_mismatch", "nan"):
        assert verdict.stays(kind, "")
    assert verdict.stays("replica_lost", "replica 1")
    assert not verdict.stays("replica_lost", "replica 0")
    assert not verdict.stays("below_quorum", "")
    assert not judge(view(rounds=RoundsView())).stays("spike", "")


# What is kept.

SPIKE = Finding(kind="spike", message="loss 9 in round 7")


def keep(run: Any, *findings: Finding, after_s: float = 0.0) -> list[Alert]:
    known = {(a.kind, a.subject): a for a in Alert.objects.filter(run=run, closed_at=None)}
    now = timezone.now() + timedelta(seconds=after_s)
    return alerting.keep(run, Verdict(findings=findings), known, now=now)


def test_one_row_however_often_it_is_found(make_run: Any, clock: Any) -> None:
    run = make_run()
    assert len(keep(run, SPIKE)) == 1
    assert keep(run, SPIKE) == []
    assert Alert.objects.get().closed_at is None
    assert keep(run) == []
    assert Alert.objects.get().closed_at == clock()
    assert Alert.objects.count() == 1


def test_what_flaps_is_told_once(make_run: Any, clock: Any) -> None:
    run = make_run()
    told = []
    for _ in range(5):
        told += [a.told_at == clock() for a in keep(run, SPIKE)]
        keep(run)
        clock.pass_s(60)
    assert told == [True, False, False, False, False]
    alert = Alert.objects.get()
    assert alert.times == 5
    assert alert.first_at < alert.opened_at


def test_what_comes_back_after_the_clock_was_set_back_is_sent(make_run: Any, clock: Any) -> None:
    run = make_run()
    keep(run, SPIKE)
    keep(run)
    clock.pass_s(-7200)
    [alert] = keep(run, SPIKE)
    assert (alert.told_at, alert.times) == (clock(), 2)


def test_what_comes_back_later_is_told_again_and_nobody_has_seen_it(
    make_run: Any, clock: Any
) -> None:
    run = make_run()
    keep(run, SPIKE)
    assert alerting.acknowledge(Alert.objects.get(), actor=run.owner)
    keep(run)
    clock.pass_s(60)
    keep(run, SPIKE)
    assert Alert.objects.get().acknowledged_by == run.owner
    keep(run)
    clock.pass_s(alerting.COOL_DOWN.total_seconds())
    (again,) = keep(run, SPIKE)
    assert again.told_at == clock()
    assert again.acknowledged_by is None


def test_two_workers_open_it_once(make_run: Any, clock: Any) -> None:
    run = make_run()
    keep(run, SPIKE)
    keep(run)
    clock.pass_s(1)
    stale = alerting.keep(run, Verdict(findings=(SPIKE,)), {}, now=clock())
    late = alerting.keep(run, Verdict(findings=(SPIKE,)), {}, now=clock())
    assert (len(stale), len(late)) == (1, 0)
    assert Alert.objects.get().times == 2


def test_an_acknowledgement_is_an_event_and_counts_once(make_run: Any, clock: Any) -> None:
    run = make_run()
    keep(run, SPIKE)
    alert = Alert.objects.get()
    assert [alerting.acknowledge(alert, actor=run.owner) for _ in range(2)] == [True, False]
    event = Event.objects.get(run=run, kind="alert")
    assert event.actor == run.owner
    assert event.message == "acknowledged: Loss spike: loss 9 in round 7"


# Through the reconciler.


def test_a_lost_replica_opens_one_and_its_return_closes_it(make_world: Any) -> None:
    world = make_world(min_quorum=2)
    world.start()
    assert not Alert.objects.exists()
    world.executor.end(world.key(1), w.Cause.ERROR)
    world.beat_all(but=(1,))
    world.tick()
    found = {a.kind: a for a in Alert.objects.filter(closed_at=None)}
    assert set(found) >= {"replica_lost"}
    assert found["replica_lost"].replica == world.replica(1)
    assert world.deltas[-1]["run"]["alerts"] == len(found)
    for _ in range(3):
        world.tick()
    assert Alert.objects.get(kind="replica_lost").times == 1
    world.tick(after_s=120)
    world.work()
    world.beat_all()
    world.tick()
    assert not Alert.objects.filter(kind="replica_lost", closed_at=None).exists()
    assert world.deltas[-1]["run"]["alerts"] == 0


def open_kinds(run: Any) -> set[str]:
    return set(Alert.objects.filter(run=run, closed_at=None).values_list("kind", flat=True))


def test_a_loss_that_is_no_number(make_world: Any) -> None:
    world = make_world()
    world.start()
    world.bucket.segment(1, 1, losses=[3.0, math.nan])
    world.tick()
    assert open_kinds(world.run) == {"nan"}
    alert = Alert.objects.get(kind="nan")
    assert (alert.subject, alert.replica.number, alert.level) == ("replica 1", 1, "error")
    # Another process of it begins anew.
    world.bucket.beat(1, 1, "computing", seq=2)
    world.tick()
    assert open_kinds(world.run) == set()


def test_rounds_are_judged_when_they_are_committed(make_world: Any) -> None:
    world = make_world(total_rounds=40)
    world.start()
    bucket = world.bucket
    slow = {"compute": 2.0, "wait": 6.0}
    for n in range(1, 7):
        for replica in (0, 1):
            bucket.contribution(n, replica)
        bucket.plan(n, [0])
        bucket.commit(n, [0])
        bucket.segment(0, n, rounds=(bucket.report(n, phases=slow),))
        late = bucket.report(n, outcome="late", phases=slow, weights_digest="e" * 64)
        bucket.segment(1, n, rounds=(late,))
        world.beat_all()
        world.tick()
        if n == 2:
            assert "goodput" not in open_kinds(world.run)
    assert open_kinds(world.run) == {"goodput", "staleness", "weights_mismatch"}
    assert Alert.objects.get(kind="staleness").subject == "replica 1"
    assert world.events("alert") == [
        "Goodput is low: 25% of the last 5 rounds' time was compute, expected at least 50%"
    ]
    for n in range(7, 13):
        for replica in (0, 1):
            bucket.contribution(n, replica)
        bucket.plan(n, [0, 1])
        bucket.commit(n, [0, 1])
        for replica in (0, 1):
            bucket.segment(replica, n, rounds=(bucket.report(n),))
        world.beat_all()
        world.tick()
    assert open_kinds(world.run) == set()


def test_limits_that_come_near(make_world: Any) -> None:
    from runs.models import ReplicaAttempt, Run

    world = make_world(time_limit_s=1000)
    world.start()
    Run.objects.update(budget_usd=10.0)
    ReplicaAttempt.objects.update(price_usd_h=45.0)
    world.run.refresh_from_db()
    world.beat_all()
    world.tick(after_s=400)
    assert ("budget", "80 %") in Alert.objects.values_list("kind", "subject")
    world.beat_all()
    world.tick(after_s=520)
    assert ("deadline", "time limit") in Alert.objects.values_list("kind", "subject")


def test_the_end_is_told_once_and_closes_the_rest(make_world: Any) -> None:
    world = make_world()
    world.start()
    world.bucket.segment(1, 1, losses=[math.nan])
    world.tick()
    world.bucket.final(4)
    world.beat_all("done")
    for number in (0, 1):
        world.executor.end(world.key(number), w.Cause.DONE, code=0)
    for _ in range(4):
        world.tick()
    assert world.run.state == "succeeded"
    assert open_kinds(world.run) == set()
    end = Alert.objects.get(kind="finished")
    assert (end.times, end.closed_at, end.level) == (1, end.opened_at, "info")


def look_after() -> None:
    """As beat does, until nobody is left to be looked after."""
    for _ in range(3):
        for pk in selectors.runs_to_look_after().values_list("pk", flat=True):
            reconcile_run(str(pk))


@pytest.mark.parametrize("how", ["stopped", "by force", "never launched"])
def test_the_end_is_told_of_a_run_that_never_began(
    make_run: Any, executor: Any, tmp_path: Path, how: str
) -> None:
    """It ends in somebody's request or in the launch, where no alert is judged."""
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
    assert not selectors.runs_to_look_after().exists()


def test_a_tick_costs_no_more_for_alerts_that_stand(
    make_world: Any, django_assert_max_num_queries: Any
) -> None:
    world = make_world(replicas=6)
    world.start()
    for number in range(6):
        world.bucket.segment(number, 1, losses=[math.nan])
    world.tick()
    assert Alert.objects.filter(closed_at=None).count() == 6
    from runs.reconcile.context import Tick

    tick = Tick(
        run=world.run, now=world.clock(), attempts=[],
        replicas=list(world.run.replicas.select_related("pool")),
    )  # fmt: skip
    with django_assert_max_num_queries(2):  # the alerts, and whose loss is no number
        alerting.watch(tick)
    assert Alert.objects.filter(closed_at=None).count() == 6
