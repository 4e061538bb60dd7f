"""Code shared by executors, tested without a backend."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest

from executors.base import (
    Cause,
    ExecutorConfig,
    JobRequest,
    JobState,
    LaunchRefused,
    NoCapacity,
    ReplicaHandle,
    ReplicaSpec,
    ReplicaStatus,
    RetryLater,
)
from executors.executor import job_requests, new_specs
from executors.launching import (
    call_each,
    collect,
    exit_cause,
    labels_of,
    retry_after_s,
    scrub,
)
from executors.local.executor import LocalProcessExecutor


def handle(key: str) -> ReplicaHandle:
    return ReplicaHandle(backend="test", launch_key=key)


def spec(key: str, **more: object) -> ReplicaSpec:
    return ReplicaSpec(launch_key=key, replica=0, **more)  # type: ignore[arg-type]


class Backend:
    """A backend with scripted responses; None is a failed poll."""

    def __init__(self, answers: list[dict[str, bool] | None]) -> None:
        self.answers = answers
        self.requested: list[list[str]] = []
        self.now = 0.0

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        self.requested.append([each.launch_key for each in handles])
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


def test_collect_polls_only_jobs_that_have_not_ended() -> None:
    backend = Backend([{"a": False, "b": True}, {"a": False}, {"a": True}])
    assert backend.collect("ab", 100) == [JobState.ENDED, JobState.ENDED]
    assert backend.requested == [["a", "b"], ["a"], ["a"]]
    assert backend.now == 4.0


def test_collect_returns_the_states_at_the_timeout() -> None:
    backend = Backend([{"a": False, "b": True}])
    assert backend.collect("ab", 5) == [JobState.RUNNING, JobState.ENDED]
    assert backend.now == 5.0
    assert Backend([{"a": False}]).collect("a", 0) == [JobState.RUNNING]
    assert Backend([{}]).collect("", 5) == []


def test_collect_retries_while_the_backend_is_unavailable() -> None:
    assert Backend([None, {"a": True}]).collect("a", 5) == [JobState.ENDED]
    backend = Backend([{"a": False}, None])
    with pytest.raises(RetryLater, match="away"):
        backend.collect("a", 5)
    assert backend.now == 5.0


def test_secrets_replace_env_and_a_replicas_own_secret_takes_precedence() -> None:
    own = spec("a", secrets={"TOKEN": "own"})
    (request,) = job_requests(
        [own],
        "module",
        {"rank_env": "RANK"},
        env={"TOKEN": "plain", "GIVEN": "yes", "SHARED": "plain"},
        secrets={"TOKEN": "shared", "SHARED": "shared"},
    )
    assert request.env == {"RANK": "0", "GIVEN": "yes"}
    assert request.secrets == {"TOKEN": "own", "SHARED": "shared"}


def test_generated_keys_are_unique() -> None:
    first, second = new_specs(2), new_specs(2)
    requests = job_requests(first, "module")
    assert [request.env for request in requests] == [{"REPLICA_RANK": "0"}, {"REPLICA_RANK": "1"}]
    assert [request.args for request in requests] == [[], []]
    assert [request.spec.replica for request in requests] == [0, 1]
    assert len({spec.launch_key for spec in (*first, *second)}) == 4


def test_labels_identify_the_job_and_cannot_be_overridden() -> None:
    result = labels_of(
        ExecutorConfig(deployment="prod"),
        spec("run-0-1", labels={"archipelago-deployment": "other", "team": "blue"}),
    )
    assert result == {
        "team": "blue",
        "archipelago-deployment": "prod",
        "archipelago-key": "run-0-1",
        "archipelago-replica": "0",
    }


def test_jobs_are_launched_concurrently_and_returned_in_order() -> None:
    met = threading.Barrier(3, timeout=600)

    def start(each: ReplicaSpec) -> ReplicaHandle:
        met.wait()  # passes only with three concurrent calls
        return handle(each.launch_key)

    result = call_each(start, [spec("a"), spec("b"), spec("c")])
    assert [each.launch_key for each in result] == ["a", "b", "c"]


def test_all_jobs_are_tried_and_unexpected_errors_take_precedence() -> None:
    tried: list[str] = []
    errors: dict[str, Exception] = {"b": LaunchRefused("no"), "d": RuntimeError("bug")}

    def start(each: ReplicaSpec) -> ReplicaHandle:
        tried.append(each.launch_key)
        if each.launch_key in errors:
            raise errors[each.launch_key]
        return handle(each.launch_key)

    with pytest.raises(LaunchRefused):
        call_each(start, [spec("a"), spec("b"), spec("c")])
    assert sorted(tried) == ["a", "b", "c"]
    with pytest.raises(RuntimeError):
        call_each(start, [spec("b"), spec("d")])


def test_secrets_are_removed_from_messages() -> None:
    output = scrub("token abc123 of abc is wrong", ["abc", "abc123", "", "i", "other"])
    assert output == "token *** of *** is wrong"


def test_neither_an_error_of_a_launch_nor_its_cause_repeats_a_secret() -> None:
    class Quoting(LocalProcessExecutor):
        def start_all(self, jobs: Sequence[JobRequest]) -> list[ReplicaHandle]:
            try:
                raise RuntimeError(f"cannot use {jobs[0].secrets}")
            except RuntimeError as error:
                raise NoCapacity(str(error), after_s=7, attempts=2) from error

    executor = Quoting(ExecutorConfig(state_dir=Path("unused")))
    own, shared = spec("a", secrets={"OWN": "s3cr3t-1"}), {"SHARED": "s3cr3t-2"}
    with pytest.raises(NoCapacity) as caught:
        executor.ensure([own], "module", secrets=shared)
    shown = "".join(traceback.format_exception(caught.value))
    assert "s3cr3t" not in shown and "cannot use" in shown
    assert (caught.value.after_s, caught.value.attempts) == (7, 2)


@pytest.mark.parametrize(
    ("code", "oom", "cause", "text"),
    [
        (0, None, Cause.DONE, ""),
        (1, None, Cause.ERROR, "exit code 1"),
        (75, None, Cause.ERROR, "another attempt can succeed"),
        (78, None, Cause.ERROR, "a restart does not help"),
        (137, True, Cause.OUT_OF_MEMORY, "out of memory"),
        (137, False, Cause.ERROR, "not an out-of-memory kill"),
        (137, None, Cause.ERROR, "does not report out-of-memory kills"),
        (-9, None, Cause.ERROR, "exit code 137"),
        (-15, None, Cause.ERROR, "ended by SIGTERM"),
        (143, None, Cause.ERROR, "ended by SIGTERM"),
        (None, None, Cause.ERROR, "without an exit code"),
    ],
)
def test_an_exit_code_has_one_cause_on_every_backend(
    code: int | None, oom: bool | None, cause: Cause, text: str
) -> None:
    result, message = exit_cause(code, out_of_memory=oom)
    assert result is cause
    assert text in message


def test_reports_of_the_backend_precede_the_exit_code() -> None:
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
