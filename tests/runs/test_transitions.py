"""State transitions: forbidden ones, races, and one Event each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from runs.exceptions import IllegalTransition
from runs.models import Event, Replica, Run
from runs.redaction import clean_text
from runs.states import (
    REPLICA_ENDED,
    REPLICA_TRANSITIONS,
    RUN_ENDED,
    RUN_TRANSITIONS,
    ReplicaState,
    RunState,
)
from runs.transitions import transition, transition_replica
from tests.runs import run_harness as w

pytestmark = pytest.mark.django_db
MakeRun = Callable[..., Any]


def put(run: Any, state: RunState) -> Any:
    Run.objects.filter(pk=run.pk).update(state=state)
    run.refresh_from_db()
    return run


def put_replica(run: Any, state: ReplicaState) -> Any:
    Replica.objects.filter(run=run, number=0).update(state=state)
    return run.replicas.get(number=0)


def test_every_state_is_in_the_tables() -> None:
    assert set(RUN_TRANSITIONS) == set(RunState)
    assert set(REPLICA_TRANSITIONS) == set(ReplicaState)


def test_ended_run_can_only_be_resumed() -> None:
    assert RUN_TRANSITIONS[RunState.SUCCEEDED] == frozenset()
    for state in RUN_ENDED - {RunState.SUCCEEDED}:
        assert RUN_TRANSITIONS[state] == {RunState.QUEUED}


def test_active_run_can_end() -> None:
    for state in set(RunState) - RUN_ENDED:
        assert RUN_TRANSITIONS[state] & RUN_ENDED


def test_ended_replica_can_only_be_restarted() -> None:
    for state in REPLICA_ENDED - {ReplicaState.LOST}:
        assert REPLICA_TRANSITIONS[state] <= {ReplicaState.RESTARTING}


@pytest.mark.parametrize(
    ("old", "to"),
    [(old, to) for old in RunState for to in RunState if to not in RUN_TRANSITIONS[old]],
)
def test_run_transition_outside_the_table_is_refused(old: RunState, to: RunState) -> None:
    run = Run(name="r", state=old)  # refused before any query
    with pytest.raises(IllegalTransition, match=f"is {old} and cannot become {to}"):
        transition(run, to, reason="because")
    assert run.state == old


@pytest.mark.parametrize(
    ("old", "to"),
    [
        (ReplicaState.PENDING, ReplicaState.COMPUTING),
        (ReplicaState.DONE, ReplicaState.COMPUTING),
        (ReplicaState.FAILED, ReplicaState.PROVISIONING),
        (ReplicaState.DRAINING, ReplicaState.COMPUTING),
        (ReplicaState.COMPUTING, ReplicaState.COMPUTING),
    ],
)
def test_replica_transition_outside_the_table_is_refused(
    old: ReplicaState, to: ReplicaState
) -> None:
    with pytest.raises(IllegalTransition, match=f"is {old} and cannot become {to}"):
        transition_replica(Replica(number=0, state=old), to, reason="because")


def test_transition_is_one_event_with_actor_states_and_reason(
    make_run: MakeRun, clock: w.Clock
) -> None:
    run = make_run()
    Event.objects.all().delete()
    clock.pass_s(60)
    assert transition(run, RunState.PROVISIONING, reason="because", actor=run.owner)
    assert (run.state, run.state_reason, run.state_since) == ("provisioning", "because", clock())
    [event] = Event.objects.all()
    fields = (event.kind, event.from_state, event.to_state, event.message, event.actor, event.at)
    assert fields == ("run_state", "queued", "provisioning", "because", run.owner, clock())
    stored = Run.objects.get(pk=run.pk)
    assert (stored.state, stored.state_since) == (run.state, run.state_since)


def test_lost_race_returns_false_and_reads_the_new_state(make_run: MakeRun) -> None:
    own = make_run()
    other = Run.objects.get(pk=own.pk)
    assert transition(other, RunState.STOPPING, reason="other")
    events = Event.objects.count()
    assert not transition(own, RunState.PROVISIONING, reason="own")
    assert (own.state, own.state_reason) == ("stopping", "other")
    assert Event.objects.count() == events


def test_lost_race_of_a_replica(make_run: MakeRun) -> None:
    run = make_run()
    own, other = run.replicas.get(number=0), run.replicas.get(number=0)
    assert transition_replica(other, ReplicaState.PROVISIONING, reason="other")
    events = Event.objects.count()
    assert not transition_replica(own, ReplicaState.EVICTED, reason="own", restarts=9)
    assert (own.state, own.state_reason, own.restarts) == ("provisioning", "other", 0)
    assert Event.objects.count() == events


def test_transition_is_rolled_back_if_its_event_fails(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr("runs.transitions.record_event", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        transition(run, RunState.PROVISIONING, reason="because")
    assert Run.objects.get(pk=run.pk).state == "queued"


def test_the_clock_of_a_run_starts_once_and_ends_once(make_run: MakeRun, clock: w.Clock) -> None:
    run = put(make_run(), RunState.PROVISIONING)
    began = clock()
    transition(run, RunState.RUNNING, reason="")
    for state in (RunState.DEGRADED, RunState.RUNNING):
        clock.pass_s(10)
        transition(run, state, reason="")
    assert run.started_at == began
    clock.pass_s(10)
    transition(run, RunState.STOPPING, reason="")
    requested_at = clock()
    clock.pass_s(10)
    transition(run, RunState.CANCELLED, reason="")
    run.refresh_from_db()
    assert (run.started_at, run.stop_requested_at, run.ended_at) == (began, requested_at, clock())


def test_a_replica_s_phases_make_no_events(make_run: MakeRun) -> None:
    replica = put_replica(make_run(), ReplicaState.COMPUTING)
    events = Event.objects.count()
    for state in (ReplicaState.UPLOADING, ReplicaState.WAITING, ReplicaState.COMPUTING):
        assert transition_replica(replica, state, reason="")
    assert Event.objects.count() == events
    assert transition_replica(replica, ReplicaState.SUSPECT, reason="silent")
    assert Event.objects.latest("id").level == Event.Level.WARNING
    assert Event.objects.count() == events + 1


def test_fields_are_set_with_the_state(make_run: MakeRun, clock: w.Clock) -> None:
    replica = put_replica(make_run(), ReplicaState.LOST)
    transition_replica(
        replica, ReplicaState.RESTARTING, reason="again", restarts=2, relaunch_at=clock()
    )
    stored = Replica.objects.get(pk=replica.pk)
    assert (stored.restarts, stored.relaunch_at) == (2, clock())
    assert (replica.restarts, replica.relaunch_at) == (2, clock())


def test_text_from_outside_fits_any_database(make_run: MakeRun) -> None:
    run = make_run()
    assert transition(run, RunState.FAILED, reason="a\x00b" + "x" * 10_000)
    stored = Run.objects.get(pk=run.pk).state_reason
    assert "\x00" not in stored
    assert len(stored) == 4000
    assert clean_text("short") == "short"
