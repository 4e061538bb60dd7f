"""What is Kubernetes' own: Secrets, names, waits that say why, refusals, rights, and many at once.

What every executor does is in ``tests/contracts``; pure functions have files of their own.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from executors.base import (
    Cause,
    JobState,
    LaunchRefused,
    NeedsPerson,
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
from tests.executors.kubernetes.world import KubernetesWorld
from tests.executors.worlds import (
    DEPLOYMENT,
    end_of,
    launch,
    number_in,
    text_of,
    wait_for,
)

DOCS = Path(__file__).parents[3] / "docs" / "backends" / "kubernetes.md"
SECRET = {"TOKEN": "s3cr3t-1c9e"}

pytestmark = pytest.mark.processes


@pytest.fixture
def world(tmp_path: Path) -> Iterator[KubernetesWorld]:
    with KubernetesWorld(tmp_path / "world") as opened:
        yield opened


def secrets_of(world: KubernetesWorld) -> list[str]:
    return [made["metadata"]["name"] for made in world.cluster.objects.all("secrets")]


def waits(executor: KubernetesExecutor, handle: ReplicaHandle, phase: str) -> ReplicaStatus:
    wait_for(lambda: executor.poll([handle])[0].phase == phase, phase)
    (status,) = executor.poll([handle])
    assert status.state is JobState.PENDING
    return status


# Secrets.


def test_the_secret_goes_with_the_job(world: KubernetesWorld) -> None:
    executor = world.executor()
    handle = launch(executor, "exit", 0, secrets=SECRET)
    assert secrets_of(world) == [world.cluster.job("run-0-1")["metadata"]["name"]]
    end_of(executor, handle)
    world.lose(handle)
    wait_for(lambda: not secrets_of(world), "the Secret to go")


def test_without_secrets_there_is_none(world: KubernetesWorld) -> None:
    executor = world.executor()
    end_of(executor, launch(executor, "exit", 0))
    assert secrets_of(world) == []


def test_a_job_that_gets_no_secret_is_taken_back(world: KubernetesWorld) -> None:
    executor = world.executor()
    world.cluster.rights[USER] = {*RIGHTS} - {("", "secrets", "create")}
    with pytest.raises(NeedsPerson, match='cannot create resource "secrets"'):
        launch(executor, "exit", 0, secrets=SECRET)
    assert executor.find("run-0-1") is None
    del world.cluster.rights[USER]
    assert end_of(executor, launch(executor, "exit", 0, secrets=SECRET)).cause is Cause.DONE


def test_too_large_a_secret_is_refused_and_leaves_nothing(world: KubernetesWorld) -> None:
    executor = world.executor()
    with pytest.raises(LaunchRefused, match="may not be more than 1048576 bytes"):
        launch(executor, "exit", 0, secrets={"TOKEN": "x" * (1 << 20) + "y"})
    assert executor.find("run-0-1") is None and executor.live() == []


def test_a_job_that_was_there_is_not_taken_back(world: KubernetesWorld, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    world.cluster.rights[USER] = {*RIGHTS} - {("", "secrets", "create")}
    with pytest.raises(NeedsPerson):
        launch(executor, "wait", tmp_path / "up", secrets=SECRET)
    assert executor.poll([handle])[0].state is JobState.RUNNING


def test_dollars_are_only_dollars(world: KubernetesWorld) -> None:
    given = ["$HOME", "$(HOME)", "$$", "$$(HOME)", "$(NOBODY)", "a$", "$"]
    executor = world.executor()
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


def test_one_key_of_two_deployments_is_two_jobs(world: KubernetesWorld) -> None:
    ours, theirs = world.executor(), world.executor(deployment="another")
    mine, other = launch(ours, "exit", 0), launch(theirs, "exit", 3)
    assert (end_of(ours, mine).exit_code, end_of(theirs, other).exit_code) == (0, 3)
    assert ours.find("run-0-1") == mine != other


def test_a_strangers_job_of_our_name_is_left_alone(world: KubernetesWorld) -> None:
    executor = world.executor()
    end_of(executor, launch(executor, "exit", 0))
    stranger = world.cluster.job("run-0-1")
    stranger["metadata"]["annotations"] = {}
    with pytest.raises(LaunchRefused, match="expected one of launch key run-0-1"):
        launch(executor, "exit", 0)
    assert executor.find("run-0-1") is None


def test_the_longest_key(world: KubernetesWorld) -> None:
    executor = world.executor()
    handle = launch(executor, "exit", 0, key="k" * 63)
    assert end_of(executor, handle).cause is Cause.DONE
    assert executor.find("k" * 63) == handle


# Waiting, and why.


def test_no_room_is_told_and_waited_for(world: KubernetesWorld, tmp_path: Path) -> None:
    executor = world.executor()
    first = launch(executor, "wait", tmp_path / "up", key="run-0-1", hardware="H100:8")
    number_in(tmp_path / "up")
    second = launch(executor, "exit", 0, key="run-1-1", hardware="gpu")
    status = waits(executor, second, "Unschedulable")
    assert status.message == "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    executor.cancel([first])
    assert end_of(executor, second).cause is Cause.DONE


def test_an_image_that_is_not_there_is_named(world: KubernetesWorld) -> None:
    world.cluster.kubelet.missing_images.add("replica:nope")
    executor = world.executor()
    handle = launch(executor, "exit", 0, image="replica:nope")
    assert '"replica:nope"' in waits(executor, handle, "ImagePullBackOff").message
    executor.cancel([handle])
    assert end_of(executor, handle).cause is Cause.CANCELLED


def test_a_job_without_a_pod_says_why(
    world: KubernetesWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Job is there, but its pod is refused: only a warning of the cluster tells."""
    monkeypatch.setattr(kubernetes, "UNEXPLAINED_S", -1.0)
    world.cluster.add_quota("small", {f"requests.{GPU}": "1"})
    executor = world.executor()
    handle = launch(executor, "exit", 0, hardware="gpu:2")
    wait_for(lambda: executor.poll([handle])[0].message, "the warning")
    (status,) = executor.poll([handle])
    assert (status.state, status.phase) == (JobState.PENDING, "FailedCreate")
    assert "FailedCreate: Error creating" in status.message
    assert "exceeded quota: small, requested: requests.nvidia.com/gpu=2" in status.message
    world.cluster.rights[USER] = set(RIGHTS)
    assert executor.poll([handle])[0].message == ""


def test_a_job_that_a_user_suspends_waits_and_can_be_cancelled(world: KubernetesWorld) -> None:
    executor = world.executor(node_selector={"zone": "none"})
    handle = launch(executor, "exit", 0)
    name = world.cluster.job("run-0-1")["metadata"]["name"]
    world.cluster.objects.patch("jobs", "default", name, {"spec": {"suspend": True}})
    wait_for(lambda: world.cluster.pods("run-0-1") == [], "its pod to go")
    assert waits(executor, handle, "Suspended").message
    executor.cancel([handle])
    assert end_of(executor, handle).cause is Cause.CANCELLED
    assert executor.live() == []


# Refusals.


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, LaunchRefused),
        (401, NeedsPerson),
        (403, NeedsPerson),
        (408, RetryLater),
        (409, RetryLater),  # two writers of a quota met
        (410, RetryLater),
        (422, LaunchRefused),
        (429, RetryLater),
        (500, RetryLater),
        (503, RetryLater),
        (504, RetryLater),
    ],
)
def test_refusals_say_what_helps(world: KubernetesWorld, code: int, kind: type[Exception]) -> None:
    executor = world.executor()
    world.cluster.fail(code, "in these words", after_s=7)
    with pytest.raises(LaunchRefused if issubclass(kind, LaunchRefused) else kind) as caught:
        launch(executor, "exit", 0)
    assert type(caught.value) is kind
    assert str(caught.value) == "in these words"
    if isinstance(caught.value, RetryLater):
        assert caught.value.after_s == 7
    assert end_of(executor, launch(executor, "exit", 0)).cause is Cause.DONE


def test_a_deployment_that_is_no_label_is_refused_at_once(world: KubernetesWorld) -> None:
    with pytest.raises(LaunchRefused, match="deployment: expected at most 63 letters"):
        world.executor(deployment="our lab")


def test_options_are_checked_at_once(world: KubernetesWorld) -> None:
    with pytest.raises(LaunchRefused, match="found imagee"):
        world.executor(imagee="x")


def test_check_does_without_knowing_who_we_are(
    world: KubernetesWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_http, "_REVIEWS", set())
    assert world.executor().check().startswith("a user in namespace default of http://")


def test_check_says_where_we_are(world: KubernetesWorld) -> None:
    said = world.executor(namespace="training").check()
    assert (
        said == f"{USER} in namespace training of {world.cluster.url} (Kubernetes v1.33.0-emulated)"
    )
    world.cluster.rights[USER] = set()
    with pytest.raises(NeedsPerson, match='cannot list resource "jobs"'):
        world.executor().check()


# Many.


def test_many_are_told_apart_and_listed_page_by_page(
    world: KubernetesWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PAGE", 2)
    monkeypatch.setattr(kubernetes, "SELECTOR_CHARS", 30)
    executor = world.executor()
    handles = [launch(executor, "exit", n, key=f"run-{n}-1") for n in range(7)]
    assert [status.exit_code for status in executor.collect(handles, 60)] == list(range(7))
    assert executor.live() == []


def test_a_poll_fits_into_an_address(world: KubernetesWorld) -> None:
    executor = world.executor()
    handles = [
        ReplicaHandle(backend="kubernetes", launch_key=f"{n:03}-{'x' * 59}") for n in range(500)
    ]
    assert {status.cause for status in executor.poll(handles)} == {Cause.LOST}
    assert world.requests() <= 2 * 9


# Logs.


def test_a_followed_log_is_taken_up_again_where_it_broke_off(
    world: KubernetesWorld, tmp_path: Path
) -> None:
    executor = world.executor()
    handle = launch(executor, "lines", tmp_path / "go")
    lines = executor.logs(handle, follow=True)
    assert next(lines).text == "first"
    world.stop()
    world.start()
    (tmp_path / "go").touch()
    assert [line.text for line in lines] == ["second", "no newline at the end"]


def test_a_followed_log_begins_with_the_pod(world: KubernetesWorld) -> None:
    world.cluster.kubelet.missing_images.add("replica:1")
    executor = world.executor()
    handle = launch(executor, "exit", 0, "said")
    assert text_of(executor, handle) == []
    lines = executor.logs(handle, follow=True)
    waits(executor, handle, "ImagePullBackOff")
    world.cluster.kubelet.missing_images.clear()
    assert [line.text for line in lines] == ["said"]


def test_a_closed_connection_does_not_fail_a_question(
    world: KubernetesWorld, tmp_path: Path
) -> None:
    """A kept connection that the server closes while a request is sent."""
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    for ask in (executor.live, lambda: executor.poll([handle]), lambda: text_of(executor, handle)):
        for request in range(2):
            world.interrupt(request, Interruption.LOST)
            ask()
            world.restore()
    assert executor.find(handle.launch_key) == handle


# Rights.


def role() -> set[tuple[str, str, str]]:
    """What the Role of the documentation allows."""
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


def test_the_documented_role_is_what_it_needs(
    world: KubernetesWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "UNEXPLAINED_S", -1.0)
    world.cluster.rights[USER] = role()
    executor = world.executor()
    executor.check()
    world.interrupt(1, Interruption.KILLED_AFTER)  # the Secret that exists is then replaced
    with pytest.raises(RetryLater):
        launch(executor, "wait", tmp_path / "up", secrets=SECRET)
    world.restore()
    handle = launch(executor, "wait", tmp_path / "up", secrets=SECRET)
    assert launch(executor, "wait", tmp_path / "up", secrets=SECRET) == handle
    assert executor.preflight(ReplicaSpec(launch_key="run-9-9", replica=0), 1) == []
    number_in(tmp_path / "up")
    world.cluster.kubelet.missing_images.add("replica:1")
    world.cluster.add_quota("none", {"pods": "0"})
    other = launch(executor, "exit", 0, key="run-1-1")
    wait_for(lambda: executor.poll([other])[0].message, "a warning")
    list(executor.logs(handle))
    executor.cancel([handle, other])
    executor.collect([handle, other], 60)
    # A Secret that is refused is the one reason to delete a Job.
    world.cluster.rights[USER] = role() - {("", "secrets", "create")}
    with pytest.raises(NeedsPerson):
        launch(executor, "exit", 0, key="run-2-1", secrets=SECRET)
    of_cluster = {("", "nodes", "list")}
    assert world.cluster.asked - of_cluster == role()
    assert role() == {*RIGHTS, *USEFUL_RIGHTS}


def test_names_are_known_before_anything_is_asked(world: KubernetesWorld) -> None:
    executor = world.executor()
    handle = launch(executor, "exit", 0)
    assert handle.data == {"name": name_of(DEPLOYMENT, "run-0-1"), "namespace": "default"}
    end_of(executor, handle)
