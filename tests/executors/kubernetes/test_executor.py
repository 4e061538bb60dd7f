"""The Kubernetes executor, beyond the contract suite: Secrets, names, pending causes, refusals,
permissions and many jobs at once. Pure functions are tested in other files.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from executors.base import (
    AccountError,
    Cause,
    JobState,
    LaunchRefused,
    ReplicaHandle,
    ReplicaSpec,
    ReplicaStatus,
    RetryLater,
)
from executors.kubernetes import client
from executors.kubernetes import executor as kubernetes
from executors.kubernetes.client import RIGHTS, USEFUL_RIGHTS
from executors.kubernetes.executor import KubernetesExecutor
from executors.kubernetes.manifest import name_of
from tests.emulators import kubernetes_http
from tests.emulators.interruptions import Interruption
from tests.emulators.kubernetes import GPU, USER
from tests.executors.harnesses import (
    DEPLOYMENT,
    end_of,
    launch,
    number_in,
    text_of,
    wait_for,
)
from tests.executors.kubernetes.harness import KubernetesHarness

DOCS = Path(__file__).parents[3] / "docs" / "backends" / "kubernetes.md"
SECRET = {"TOKEN": "s3cr3t-1c9e"}

pytestmark = pytest.mark.processes


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[KubernetesHarness]:
    with KubernetesHarness(tmp_path / "world") as opened:
        yield opened


def secrets_of(harness: KubernetesHarness) -> list[str]:
    return [made["metadata"]["name"] for made in harness.cluster.objects.all("secrets")]


def waits(executor: KubernetesExecutor, handle: ReplicaHandle, phase: str) -> ReplicaStatus:
    wait_for(lambda: executor.poll([handle])[0].phase == phase, phase)
    (status,) = executor.poll([handle])
    assert status.state is JobState.PENDING
    return status


# Secrets.


def test_the_secret_goes_with_the_job(harness: KubernetesHarness) -> None:
    executor = harness.executor()
    handle = launch(executor, "exit", 0, secrets=SECRET)
    assert secrets_of(harness) == [harness.cluster.job("run-0-1")["metadata"]["name"]]
    end_of(executor, handle)
    harness.lose(handle)
    wait_for(lambda: not secrets_of(harness), "the Secret to go")


def test_without_secrets_there_is_none(harness: KubernetesHarness) -> None:
    executor = harness.executor()
    end_of(executor, launch(executor, "exit", 0))
    assert secrets_of(harness) == []


def test_a_job_without_its_secret_is_deleted(harness: KubernetesHarness) -> None:
    executor = harness.executor()
    harness.cluster.rights[USER] = {*RIGHTS} - {("", "secrets", "create")}
    with pytest.raises(AccountError, match='cannot create resource "secrets"'):
        launch(executor, "exit", 0, secrets=SECRET)
    assert executor.find("run-0-1") is None
    del harness.cluster.rights[USER]
    assert end_of(executor, launch(executor, "exit", 0, secrets=SECRET)).cause is Cause.DONE


def test_too_large_a_secret_is_refused_and_leaves_nothing(harness: KubernetesHarness) -> None:
    executor = harness.executor()
    with pytest.raises(LaunchRefused, match="may not be more than 1048576 bytes"):
        launch(executor, "exit", 0, secrets={"TOKEN": "x" * (1 << 20) + "y"})
    assert executor.find("run-0-1") is None and executor.live() == []


def test_an_existing_job_is_not_deleted(harness: KubernetesHarness, tmp_path: Path) -> None:
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    harness.cluster.rights[USER] = {*RIGHTS} - {("", "secrets", "create")}
    with pytest.raises(AccountError):
        launch(executor, "wait", tmp_path / "up", secrets=SECRET)
    assert executor.poll([handle])[0].state is JobState.RUNNING


def test_dollars_are_only_dollars(harness: KubernetesHarness) -> None:
    given = ["$HOME", "$(HOME)", "$$", "$$(HOME)", "$(UNSET)", "a$", "$"]
    executor = harness.executor()
    handle = launch(executor, "args", *given)
    end_of(executor, handle)
    assert json.loads("".join(text_of(executor, handle))) == given
    handle = launch(
        executor, "env", key="run-0-2", env={"GIVEN": "$$ $(HOME)"}, secrets={"S": "$$"}
    )
    end_of(executor, handle)
    seen = json.loads("".join(text_of(executor, handle)))
    assert (seen["GIVEN"], seen["S"]) == ("$$ $(HOME)", "$$")


# Names.


def test_one_key_of_two_deployments_is_two_jobs(harness: KubernetesHarness) -> None:
    one, other = harness.executor(), harness.executor(deployment="another")
    handle, other_handle = launch(one, "exit", 0), launch(other, "exit", 3)
    assert (end_of(one, handle).exit_code, end_of(other, other_handle).exit_code) == (0, 3)
    assert one.find("run-0-1") == handle != other_handle


def test_a_foreign_job_of_the_same_name_is_not_changed(harness: KubernetesHarness) -> None:
    executor = harness.executor()
    end_of(executor, launch(executor, "exit", 0))
    stranger = harness.cluster.job("run-0-1")
    stranger["metadata"]["annotations"] = {}
    with pytest.raises(LaunchRefused, match="expected that of launch key run-0-1"):
        launch(executor, "exit", 0)
    assert executor.find("run-0-1") is None


def test_the_longest_key(harness: KubernetesHarness) -> None:
    executor = harness.executor()
    handle = launch(executor, "exit", 0, key="k" * 63)
    assert end_of(executor, handle).cause is Cause.DONE
    assert executor.find("k" * 63) == handle


# Pending causes


def test_lack_of_capacity_is_reported_as_pending(
    harness: KubernetesHarness, tmp_path: Path
) -> None:
    executor = harness.executor()
    first = launch(executor, "wait", tmp_path / "up", key="run-0-1", hardware="H100:8")
    number_in(tmp_path / "up")
    second = launch(executor, "exit", 0, key="run-1-1", hardware="gpu")
    status = waits(executor, second, "Unschedulable")
    assert status.message == "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    executor.cancel([first])
    assert end_of(executor, second).cause is Cause.DONE


def test_a_missing_image_is_named(harness: KubernetesHarness) -> None:
    harness.cluster.kubelet.missing_images.add("replica:nope")
    executor = harness.executor()
    handle = launch(executor, "exit", 0, image="replica:nope")
    assert '"replica:nope"' in waits(executor, handle, "ImagePullBackOff").message
    executor.cancel([handle])
    assert end_of(executor, handle).cause is Cause.CANCELLED


def test_a_job_without_a_pod_shows_the_reason(
    harness: KubernetesHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Job exists, but its pod is refused: only a warning event shows the reason."""
    monkeypatch.setattr(kubernetes, "UNEXPLAINED_S", -1.0)
    harness.cluster.add_quota("small", {f"requests.{GPU}": "1"})
    executor = harness.executor()
    handle = launch(executor, "exit", 0, hardware="gpu:2")
    wait_for(lambda: executor.poll([handle])[0].message, "the warning")
    (status,) = executor.poll([handle])
    assert (status.state, status.phase) == (JobState.PENDING, "FailedCreate")
    assert "FailedCreate: Error creating" in status.message
    assert "exceeded quota: small, requested: requests.nvidia.com/gpu=2" in status.message
    harness.cluster.rights[USER] = set(RIGHTS)
    assert executor.poll([handle])[0].message == ""


def test_a_job_that_a_user_suspends_waits_and_can_be_cancelled(harness: KubernetesHarness) -> None:
    executor = harness.executor(node_selector={"zone": "none"})
    handle = launch(executor, "exit", 0)
    name = harness.cluster.job("run-0-1")["metadata"]["name"]
    harness.cluster.objects.patch("jobs", "default", name, {"spec": {"suspend": True}})
    wait_for(lambda: harness.cluster.pods("run-0-1") == [], "its pod to go")
    assert waits(executor, handle, "Suspended").message
    executor.cancel([handle])
    assert end_of(executor, handle).cause is Cause.CANCELLED
    assert executor.live() == []


# Refusals.


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, LaunchRefused),
        (401, AccountError),
        (403, AccountError),
        (408, RetryLater),
        (409, RetryLater),  # a conflict of two updates of a quota
        (410, RetryLater),
        (422, LaunchRefused),
        (429, RetryLater),
        (500, RetryLater),
        (503, RetryLater),
        (504, RetryLater),
    ],
)
def test_refusals_are_classified(
    harness: KubernetesHarness, code: int, kind: type[Exception]
) -> None:
    executor = harness.executor()
    harness.cluster.fail(code, "in these words", after_s=7)
    with pytest.raises(LaunchRefused if issubclass(kind, LaunchRefused) else kind) as caught:
        launch(executor, "exit", 0)
    assert type(caught.value) is kind
    assert str(caught.value) == "in these words"
    if isinstance(caught.value, RetryLater):
        assert caught.value.after_s == 7
    assert end_of(executor, launch(executor, "exit", 0)).cause is Cause.DONE


def test_an_invalid_deployment_is_refused_at_once(harness: KubernetesHarness) -> None:
    with pytest.raises(LaunchRefused, match="deployment: expected at most 63 letters"):
        harness.executor(deployment="our lab")


def test_options_are_checked_at_once(harness: KubernetesHarness) -> None:
    with pytest.raises(LaunchRefused, match="found imagee"):
        harness.executor(imagee="x")


def test_check_works_without_the_permission_to_read_the_identity(
    harness: KubernetesHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_http, "_REVIEWS", set())
    assert harness.executor().check().startswith("a user in namespace default of http://")


def test_check_shows_the_cluster(harness: KubernetesHarness) -> None:
    output = harness.executor(namespace="training").check()
    where = f"namespace training of {harness.cluster.url}"
    assert output == f"{USER} in {where} (Kubernetes v1.33.0-emulated)"
    harness.cluster.rights[USER] = set()
    with pytest.raises(AccountError, match='cannot list resource "jobs"'):
        harness.executor().check()


# Many.


def test_many_jobs_are_listed_page_by_page(
    harness: KubernetesHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PAGE", 2)
    monkeypatch.setattr(kubernetes, "SELECTOR_CHARS", 30)
    executor = harness.executor()
    handles = [launch(executor, "exit", n, key=f"run-{n}-1") for n in range(7)]
    assert [status.exit_code for status in executor.collect(handles, 60)] == list(range(7))
    assert executor.live() == []


def test_a_poll_fits_into_an_address(harness: KubernetesHarness) -> None:
    executor = harness.executor()
    handles = [
        ReplicaHandle(backend="kubernetes", launch_key=f"{n:03}-{'x' * 59}") for n in range(500)
    ]
    assert {status.cause for status in executor.poll(handles)} == {Cause.LOST}
    assert harness.requests() <= 2 * 9


# Logs.


def test_a_followed_log_continues_after_an_interruption(
    harness: KubernetesHarness, tmp_path: Path
) -> None:
    executor = harness.executor()
    handle = launch(executor, "lines", tmp_path / "go")
    lines = executor.logs(handle, follow=True)
    assert next(lines).text == "first"
    harness.stop()
    harness.start()
    (tmp_path / "go").touch()
    assert [line.text for line in lines] == ["second", "no newline at the end"]


def test_a_followed_log_begins_with_the_pod(harness: KubernetesHarness) -> None:
    harness.cluster.kubelet.missing_images.add("replica:1")
    executor = harness.executor()
    handle = launch(executor, "exit", 0, "printed")
    assert text_of(executor, handle) == []
    lines = executor.logs(handle, follow=True)
    waits(executor, handle, "ImagePullBackOff")
    harness.cluster.kubelet.missing_images.clear()
    assert [line.text for line in lines] == ["printed"]


def test_a_closed_connection_does_not_fail_a_question(
    harness: KubernetesHarness, tmp_path: Path
) -> None:
    """The server closes an idle connection while a request is sent."""
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    for ask in (executor.live, lambda: executor.poll([handle]), lambda: text_of(executor, handle)):
        for request in range(2):
            harness.interrupt(request, Interruption.LOST)
            ask()
            harness.restore()
    assert executor.find(handle.launch_key) == handle


# Rights.


def role() -> set[tuple[str, str, str]]:
    """The permissions of the documented Role."""
    blocks = DOCS.read_text().split("```yaml\n")[1:]
    for block in blocks:
        for made in yaml.safe_load_all(textwrap.dedent(block.partition("```")[0])):
            if isinstance(made, dict) and made.get("kind") == "Role":
                return {
                    (group, resource, verb)
                    for rule in made["rules"]
                    for group in rule["apiGroups"]
                    for resource in rule["resources"]
                    for verb in rule["verbs"]
                }
    raise AssertionError(f"{DOCS}: expected a Role")


def test_the_documented_role_has_exactly_the_needed_permissions(
    harness: KubernetesHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "UNEXPLAINED_S", -1.0)
    harness.cluster.rights[USER] = role()
    executor = harness.executor()
    executor.check()
    harness.interrupt(1, Interruption.KILLED_AFTER)  # the existing Secret is then replaced
    with pytest.raises(RetryLater):
        launch(executor, "wait", tmp_path / "up", secrets=SECRET)
    harness.restore()
    handle = launch(executor, "wait", tmp_path / "up", secrets=SECRET)
    assert launch(executor, "wait", tmp_path / "up", secrets=SECRET) == handle
    assert executor.preflight(ReplicaSpec(launch_key="run-9-9", replica=0), 1) == []
    number_in(tmp_path / "up")
    harness.cluster.kubelet.missing_images.add("replica:1")
    harness.cluster.add_quota("none", {"pods": "0"})
    other = launch(executor, "exit", 0, key="run-1-1")
    wait_for(lambda: executor.poll([other])[0].message, "a warning")
    list(executor.logs(handle))
    executor.cancel([handle, other])
    executor.collect([handle, other], 60)
    # Only a refused Secret leads to the deletion of a Job.
    harness.cluster.rights[USER] = role() - {("", "secrets", "create")}
    with pytest.raises(AccountError):
        launch(executor, "exit", 0, key="run-2-1", secrets=SECRET)
    of_cluster = {("", "nodes", "list")}
    assert harness.cluster.requested_rights - of_cluster == role()
    assert role() == {*RIGHTS, *USEFUL_RIGHTS}


def test_names_are_computed_without_a_request(harness: KubernetesHarness) -> None:
    executor = harness.executor()
    handle = launch(executor, "exit", 0)
    assert handle.data == {"name": name_of(DEPLOYMENT, "run-0-1"), "namespace": "default"}
    end_of(executor, handle)
