"""Hugging Face Jobs, beyond the contract suite: lost responses, two jobs of one key, messages of
the Hub, and its client in a process with other uses of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
from huggingface_hub import HfApi

from executors.base import (
    AccountError,
    Cause,
    ExecutorConfig,
    JobState,
    LaunchRefused,
    ReplicaSpec,
    RetryLater,
)
from executors.huggingface.executor import HFJobsExecutor
from tests.emulators.huggingface import TOKEN, USER, HuggingFaceHub, SubmitFault
from tests.executors.harnesses import end_of, launch, number_in, wait_for
from tests.executors.huggingface.harness import HuggingFaceHarness, job_id, jobs_of

pytestmark = pytest.mark.processes


def doubled(hub: HuggingFaceHub, key: str = "run-0-1") -> list[str]:
    """Two live jobs of one launch key, as after a race. Returns their ids, the older first."""
    labels = {
        "archipelago-deployment": "contract",
        "archipelago-key": key,
        "archipelago-replica": "0",
    }
    api = HfApi(token=TOKEN, endpoint=hub.url)
    command = ["python", "-c", "import time; time.sleep(600)"]
    made = [
        api.run_job(image="python:3.12", command=command, labels=labels, namespace=USER, timeout=60)
        for _ in range(2)
    ]
    return [job.id for job in sorted(made, key=lambda job: (job.created_at, job.id))]


# Requests


def test_a_job_is_labelled_named_and_given_its_timeout(
    hub: HuggingFaceHub, executor: HFJobsExecutor
) -> None:
    launch(executor, "exit", 0, replica=7, timeout_s=90.2, labels={"run": "a/b", "name": "mine"})
    (record,) = hub._records.values()
    assert record.spec["timeoutSeconds"] == 91
    assert record.labels == {
        "name": "run-0-1",
        "run": "a-b",
        "archipelago-deployment": "contract",
        "archipelago-key": "run-0-1",
        "archipelago-replica": "7",
        "archipelago-timeout-s": "91",
    }
    assert record.spec["flavor"] == "cpu-basic"
    assert record.spec["dockerImage"].startswith("pytorch/pytorch:")


def test_only_secrets_are_secret(hub: HuggingFaceHub, executor: HFJobsExecutor) -> None:
    executor.launch_replicas(1, "this", env={"A": "plain"}, secrets={"B": "hidden"})
    (record,) = hub._records.values()
    plain = {"REPLICA_RANK": "0", "A": "plain", "PYTHONUNBUFFERED": "1"}
    assert record.spec["environment"] == plain
    assert record.spec["secrets"] == {"B": "hidden"}


def test_a_secret_that_the_hub_quotes_is_not_repeated(
    hub: HuggingFaceHub, executor: HFJobsExecutor
) -> None:
    hub.refuse_quota(f"no credit for s3cr3t-9d2f of {TOKEN}")
    with pytest.raises(AccountError, match=r"no credit for \*\*\* of \*\*\*$") as caught:
        launch(executor, "exit", 0, secrets={"KEY": "s3cr3t-9d2f"})
    # nor in the traceback of its cause
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_the_hubs_default_of_half_an_hour_is_never_used(
    hub: HuggingFaceHub, harness: HuggingFaceHarness
) -> None:
    launch(harness.executor(), "exit", 0, key="run-0-1")
    launch(harness.executor(max_timeout_s=7200), "exit", 0, key="run-0-2")
    assert [r.spec["timeoutSeconds"] for r in hub._records.values()] == [3 * 24 * 3600, 7200]


def test_volumes_are_mounted(hub: HuggingFaceHub, harness: HuggingFaceHarness) -> None:
    executor = harness.executor(volumes=["hf://buckets/islands/data:/data:ro"])
    launch(executor, "exit", 0, options={"volumes": ["hf://islands/model:/model"]})
    (record,) = hub._records.values()
    assert record.spec["volumes"] == [
        {"type": "bucket", "source": "islands/data", "mountPath": "/data", "readOnly": True},
        {"type": "model", "source": "islands/model", "mountPath": "/model"},
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"volumes": ["/no/uri:/data"]}, "Must start with 'hf://'"),
        ({"volumes": ["hf://buckets/islands/data"]}, "Missing mount path"),
        ({"gpu": 2}, "expected namespace, .*found gpu"),
    ],
)
def test_a_volume_that_cannot_be_read_is_refused(
    executor: HFJobsExecutor, options: dict[str, Any], words: str
) -> None:
    spec = ReplicaSpec(launch_key="run-0-1", replica=0, options=options)
    (problem,) = executor.preflight(spec, 1)
    assert problem.field == "options"
    with pytest.raises(LaunchRefused, match=words):
        launch(executor, "exit", 0, options=options)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ExecutorConfig(options={"nmaespace": "x"}), "expected namespace, .*found.*nmaespace"),
        (ExecutorConfig(deployment="a.b"), "deployment: expected .* found 'a.b'"),
        (ExecutorConfig(deployment=""), "deployment: expected"),
    ],
)
def test_an_invalid_configuration_is_refused(config: ExecutorConfig, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        HFJobsExecutor(config)


def test_refusals_have_the_hubs_message(executor: HFJobsExecutor) -> None:
    with pytest.raises(LaunchRefused, match=r"run-0-1 on h1000: 400 Bad Request: expected one of"):
        launch(executor, "exit", 0, hardware="h1000")


# One key, one job.


@pytest.mark.parametrize("fault", ["started", "hung_up"])
def test_a_submission_whose_response_was_lost_is_found(
    hub: HuggingFaceHub, executor: HFJobsExecutor, fault: SubmitFault
) -> None:
    hub.fail_submit(fault)
    handle = launch(executor, "exit", 0)
    assert [job.id for job in jobs_of(hub)] == [job_id(handle)]
    assert end_of(executor, handle).cause is Cause.DONE


def test_a_failed_submission_is_retried_by_the_caller(
    hub: HuggingFaceHub, executor: HFJobsExecutor
) -> None:
    hub.fail_submit("refused")
    with pytest.raises(RetryLater, match="500 Internal Server Error"):
        launch(executor, "exit", 0)
    assert jobs_of(hub) == []
    assert end_of(executor, launch(executor, "exit", 0)).cause is Cause.DONE


def test_a_launch_makes_two_requests_per_job_and_two_in_total(harness: HuggingFaceHarness) -> None:
    harness.hub.scheduling = True
    handles = harness.executor().launch_replicas(6, "this")
    assert 6 * 2 + 2 <= harness.requests() <= 6 * 2 + 3  # and the token's user, if not cached
    harness.executor().cancel(handles)


def test_the_oldest_of_two_jobs_of_one_key_is_used(
    hub: HuggingFaceHub, executor: HFJobsExecutor
) -> None:
    old, young = doubled(hub)
    assert job_id(executor.find("run-0-1")) == old
    assert [job_id(handle) for handle in executor.live()] == [old, young]
    assert {handle.launch_key for handle in executor.live()} == {"run-0-1"}
    assert job_id(launch(executor, "exit", 0)) == old
    wait_for(lambda: [job_id(h) for h in executor.live()] == [old], "the younger one to end")


def test_a_cancelled_job_hides_no_live_job(hub: HuggingFaceHub, executor: HFJobsExecutor) -> None:
    old, young = doubled(hub)
    first, second = executor.live()
    executor.cancel([first])
    end_of(executor, first)
    assert job_id(executor.find("run-0-1")) == young
    executor.cancel([second])
    end_of(executor, second)
    assert job_id(executor.find("run-0-1")) == old


def test_the_younger_job_of_a_race_is_cancelled(
    hub: HuggingFaceHub, harness: HuggingFaceHarness, tmp_path: Path
) -> None:
    first = launch(harness.executor(), "wait", tmp_path / "first")
    late = harness.executor()
    late._settled = lambda launch_key: None  # type: ignore[method-assign]  # it listed just before
    assert launch(late, "wait", tmp_path / "second") == first
    wait_for(
        lambda: (
            [job.id for job in jobs_of(hub) if job.status.stage == "RUNNING"] == [job_id(first)]
        ),
        "the second to end",
    )
    assert len(jobs_of(hub)) == 2


def test_an_ignored_filter_returns_no_foreign_jobs(
    hub: HuggingFaceHub, harness: HuggingFaceHarness, tmp_path: Path
) -> None:
    foreign = launch(harness.executor(deployment="another"), "wait", tmp_path / "up")
    ended = launch(harness.executor(), "exit", 0, key="run-1-1")
    end_of(harness.executor(), ended)
    hub.filters = False
    executor = harness.executor()
    assert executor.live() == []
    assert executor.find("run-0-1") is None
    assert executor.find("run-1-1") == ended
    assert foreign != ended


def test_lists_are_read_to_their_last_page(tmp_path: Path, harness: HuggingFaceHarness) -> None:
    harness.hub.page_size = 2
    executor = harness.executor()
    handles = [launch(executor, "wait", tmp_path / str(n), key=f"run-{n}-1") for n in range(5)]
    assert executor.live() == handles
    assert {status.state for status in executor.poll(handles)} <= {JobState.RUNNING}
    executor.cancel(handles)
    executor.collect(handles, 60)


def test_an_ended_job_is_read_once(harness: HuggingFaceHarness, tmp_path: Path) -> None:
    executor = harness.executor()
    over = [launch(executor, "exit", 0, key=f"run-{n}-1") for n in range(3)]
    alive = [launch(executor, "wait", tmp_path / str(n), key=f"run-{n}-2") for n in range(2)]
    for handle in over:
        end_of(harness.executor(), handle)
    counts = []
    for _ in range(2):
        before = harness.requests()
        executor.poll([*over, *alive])
        counts.append(harness.requests() - before)
    assert counts == [1 + 3, 1]


# States


def test_a_job_that_reappears_is_not_lost(
    hub: HuggingFaceHub, executor: HFJobsExecutor, tmp_path: Path
) -> None:
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    record = hub._records.pop(job_id(handle))
    assert executor.poll([handle])[0].cause is Cause.LOST
    hub._records[record.id] = record
    assert executor.poll([handle])[0].state is JobState.RUNNING
    executor.cancel([handle])
    end_of(executor, handle)


def test_a_job_without_a_machine_is_pending(
    hub: HuggingFaceHub, executor: HFJobsExecutor, tmp_path: Path
) -> None:
    hub.scheduling = True
    waiting = [launch(executor, "wait", tmp_path / str(n), key=f"run-{n}-1") for n in range(2)]
    (status, _) = executor.poll(waiting)
    assert (status.state, status.phase) == (JobState.PENDING, "SCHEDULING")
    assert (status.started_wall_s, status.deadline_wall_s) == (None, None)
    executor.cancel(waiting[:1])
    assert end_of(executor, waiting[0]).cause is Cause.CANCELLED
    hub.schedule()
    number_in(tmp_path / "1")
    assert not (tmp_path / "0").exists()
    executor.cancel(waiting)
    end_of(executor, waiting[1])


def test_a_follower_outlasts_a_hub_that_restarts(
    hub: HuggingFaceHub, executor: HFJobsExecutor, tmp_path: Path
) -> None:
    handle = launch(executor, "lines", tmp_path / "go on")
    lines = executor.logs(handle, follow=True)
    assert next(lines).text == "first"
    hub.stop()
    hub.start()
    (tmp_path / "go on").touch()
    assert [line.text for line in lines] == ["second", "no newline at the end"]


def test_an_invalid_position_is_refused(executor: HFJobsExecutor) -> None:
    handle = launch(executor, "exit", 0, "printed")
    with pytest.raises(ValueError, match="expected a number of lines, found 'line 3'"):
        list(executor.logs(handle, after="line 3"))
    end_of(executor, handle)


# Faults over HTTP


def test_faults_can_be_injected_over_http(
    hub: HuggingFaceHub, executor: HFJobsExecutor, tmp_path: Path
) -> None:
    def fault(name: str, **arguments: object) -> int:
        url = f"{hub.url}/_emulator/{name}"
        return httpx2.post(url, json=arguments).status_code

    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    assert fault("preempt", job=handle.launch_key) == 200
    assert end_of(executor, handle).cause is Cause.PREEMPTED
    assert fault("refuse_quota", message="nothing left") == 200
    with pytest.raises(AccountError, match="nothing left"):
        launch(executor, "exit", 0, key="run-0-2")
    assert fault("refuse_quota", message=None) == 200
    assert end_of(executor, launch(executor, "exit", 0, key="run-0-2")).cause is Cause.DONE
    assert fault("preempt", job="unknown") == 400
    assert fault("no_such_fault") == 404


@pytest.mark.parametrize("stage", ["BUILDING", "PAUSED", "RESTARTING"])
def test_a_job_at_an_unknown_stage_has_not_ended(
    hub: HuggingFaceHub, executor: HFJobsExecutor, tmp_path: Path, stage: str
) -> None:
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    hub.restage(job_id(handle), stage)
    assert executor.live() == [handle]  # the reaper sees it
    (status,) = executor.poll([handle])
    assert (status.state, status.cause, status.phase) == (JobState.RUNNING, None, stage)
    assert f"unknown stage, {stage}" in status.message
    assert executor.find(handle.launch_key) == handle
    hub.restage(job_id(handle), None)
    executor.cancel([handle])
    assert end_of(executor, handle).cause is Cause.CANCELLED
    assert executor.live() == []


def test_jobs_too_old_to_run_are_not_read_again(
    hub: HuggingFaceHub, harness: HuggingFaceHarness
) -> None:
    hub.page_size = 2
    executor = harness.executor()
    for n in range(6):
        end_of(executor, launch(executor, "exit", 0, key=f"run-{n}-1"))
    before = hub.requests
    assert executor.live() == []
    assert hub.requests - before == 4  # one list of live jobs, three pages of young ones
    executor._clock = lambda: datetime.now(UTC) + timedelta(days=9)
    before = hub.requests
    assert executor.live() == []
    assert hub.requests - before == 2


def test_duplicates_are_resolved_by_the_next_ensure_oldest_first(
    hub: HuggingFaceHub, harness: HuggingFaceHarness, tmp_path: Path
) -> None:
    """The list lags, so a submission whose response was lost is repeated."""
    executor = harness.executor()
    hub.hold_lists()
    hub.fail_submit("started")
    with pytest.raises(RetryLater):
        launch(executor, "wait", tmp_path / "up")
    second = launch(executor, "wait", tmp_path / "up")
    hub.hold_lists(False)
    assert len(executor.live()) == 2
    first = launch(harness.executor(), "wait", tmp_path / "up")
    assert first != second
    wait_for(lambda: executor.live() == [first], "the younger job to end")
    assert executor.poll([second])[0].cause is Cause.CANCELLED
