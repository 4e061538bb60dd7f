"""What executors share, without a backend."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from executors.base import (
    Cause,
    ExecutorConfig,
    JobState,
    LaunchRefused,
    ReplicaHandle,
    ReplicaSpec,
    ReplicaStatus,
    RetryLater,
)
from executors.launching import (
    collect,
    exit_cause,
    labels_of,
    launch_each,
    new_specs,
    prepare,
    retry_after_s,
    scrub,
)


def handle(key: str) -> ReplicaHandle:
    return ReplicaHandle(backend="test", launch_key=key)


def spec(key: str, **more: object) -> ReplicaSpec:
    return ReplicaSpec(launch_key=key, replica=0, **more)  # type: ignore[arg-type]


class Backend:
    """Jobs that end when so many polls are over; None for an answer that fails."""

    def __init__(self, answers: list[dict[str, bool] | None]) -> None:
        self.answers = answers
        self.asked: list[list[str]] = []
        self.now = 0.0

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        self.asked.append([each.launch_key for each in handles])
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            raise RetryLater("away")
        states = (JobState.RUNNING, JobState.ENDED)
        return [ReplicaStatus(state=states[answer[each.launch_key]]) for each in handles]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def collect(self, keys: str, timeout: float) -> list[JobState]:
        statuses = collect(
            self.poll,
            [handle(key) for key in keys],
            timeout,
            every_s=2.0,
            sleep=self.sleep,
            clock=lambda: self.now,
        )
        return [status.state for status in statuses]


def test_collect_asks_again_only_for_those_that_go_on() -> None:
    backend = Backend([{"a": False, "b": True}, {"a": False}, {"a": True}])
    assert backend.collect("ab", 100) == [JobState.ENDED, JobState.ENDED]
    assert backend.asked == [["a", "b"], ["a"], ["a"]]
    assert backend.now == 4.0


def test_collect_gives_the_states_when_the_time_is_over() -> None:
    backend = Backend([{"a": False, "b": True}])
    assert backend.collect("ab", 5) == [JobState.RUNNING, JobState.ENDED]
    assert backend.now == 5.0
    assert Backend([{"a": False}]).collect("a", 0) == [JobState.RUNNING]
    assert Backend([{}]).collect("", 5) == []


def test_collect_waits_out_a_backend_that_is_away_for_a_while() -> None:
    assert Backend([None, {"a": True}]).collect("a", 5) == [JobState.ENDED]
    backend = Backend([{"a": False}, None])
    with pytest.raises(RetryLater, match="away"):
        backend.collect("a", 5)
    assert backend.now == 5.0


def test_a_name_that_is_given_as_both_is_a_secret_and_the_replicas_own_goes_first() -> None:
    own = spec("a", secrets={"TOKEN": "own"})
    request = prepare([own], {"rank_env": "RANK"})
    plain, hidden = request.environment(
        own,
        env={"TOKEN": "plain", "GIVEN": "yes", "SHARED": "plain"},
        secrets={"TOKEN": "shared", "SHARED": "shared"},
    )
    assert plain == {"RANK": "0", "GIVEN": "yes"}
    assert hidden == {"TOKEN": "own", "SHARED": "shared"}


def test_made_up_keys_are_new_every_time() -> None:
    first, second = new_specs(2), new_specs(2)
    request = prepare(first, None)
    assert request.rank_env == "REPLICA_RANK" and request.args == []
    assert [spec.replica for spec in request.specs] == [0, 1]
    assert len({spec.launch_key for spec in (*first, *second)}) == 4


def test_labels_say_whose_job_it_is_and_cannot_be_taken_over() -> None:
    found = labels_of(
        ExecutorConfig(deployment="prod"),
        spec("run-0-1", labels={"archipelago-deployment": "other", "team": "blue"}),
    )
    assert found == {
        "team": "blue",
        "archipelago-deployment": "prod",
        "archipelago-key": "run-0-1",
        "archipelago-replica": "0",
    }


def test_specs_are_launched_at_once_and_handed_back_in_order() -> None:
    met = threading.Barrier(3, timeout=30)

    def start(each: ReplicaSpec) -> ReplicaHandle:
        met.wait()  # passes only where three are under way
        return handle(each.launch_key)

    found = launch_each(start, [spec("a"), spec("b"), spec("c")])
    assert [each.launch_key for each in found] == ["a", "b", "c"]


def test_all_are_tried_where_one_fails_and_a_bug_is_not_hidden_by_a_refusal() -> None:
    tried: list[str] = []
    errors: dict[str, Exception] = {"b": LaunchRefused("no"), "d": RuntimeError("bug")}

    def start(each: ReplicaSpec) -> ReplicaHandle:
        tried.append(each.launch_key)
        if each.launch_key in errors:
            raise errors[each.launch_key]
        return handle(each.launch_key)

    with pytest.raises(LaunchRefused):
        launch_each(start, [spec("a"), spec("b"), spec("c")])
    assert sorted(tried) == ["a", "b", "c"]
    with pytest.raises(RuntimeError):
        launch_each(start, [spec("b"), spec("d")])


def test_messages_lose_their_secrets() -> None:
    said = scrub("token abc123 of abc is wrong", ["abc", "abc123", "", "other"])
    assert said == "token *** of *** is wrong"


@pytest.mark.parametrize(
    ("code", "oom", "cause", "text"),
    [
        (0, None, Cause.DONE, ""),
        (1, None, Cause.ERROR, "exit code 1"),
        (75, None, Cause.ERROR, "another attempt can succeed"),
        (78, None, Cause.ERROR, "a restart does not change"),
        (137, True, Cause.OUT_OF_MEMORY, "out of memory"),
        (137, False, Cause.ERROR, "not for lack of memory"),
        (137, None, Cause.ERROR, "does not report whether"),
        (-9, None, Cause.ERROR, "exit code 137"),
        (-15, None, Cause.ERROR, "ended by SIGTERM"),
        (143, None, Cause.ERROR, "ended by SIGTERM"),
        (None, None, Cause.ERROR, "without an exit code"),
    ],
)
def test_an_exit_code_has_one_cause_on_every_backend(
    code: int | None, oom: bool | None, cause: Cause, text: str
) -> None:
    found, message = exit_cause(code, out_of_memory=oom)
    assert found is cause
    assert text in message


def test_the_backends_own_report_goes_before_the_exit_code() -> None:
    assert exit_cause(0, cancelled=True, preempted=True)[0] is Cause.CANCELLED
    assert exit_cause(137, preempted=True, out_of_memory=True)[0] is Cause.PREEMPTED
    assert exit_cause(143, deadline=True)[0] is Cause.DEADLINE


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        (7, 7.0),
        (None, None),
        ("", None),
        ("soon", None),
        ("-3", None),
        ("Thu, 01 Jan 1970 00:16:50 GMT", 10.0),
        ("Thu, 01 Jan 1970 00:00:01 GMT", 0.0),
        ("99999999", 3600.0),
    ],
)
def test_retry_after_has_two_forms(value: object, seconds: float | None) -> None:
    assert retry_after_s(value, now=lambda: 1000.0) == seconds
