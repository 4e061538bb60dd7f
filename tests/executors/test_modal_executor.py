"""What only Modal does: GPUs that nobody waits for, images, two kinds of Sandbox, its own ends.

What every executor does is in ``tests/contracts/test_executor*.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from emulators.modal import ModalServer
from executors.base import (
    Cause,
    CodeRef,
    JobState,
    LaunchRefused,
    NeedsPerson,
    ReplicaHandle,
    ReplicaSpec,
    RetryLater,
)
from executors.modal import ModalExecutor
from tests.executors.modal_world import ModalWorld
from tests.executors.worlds import config, end_of, launch, number_in, wait_for

pytestmark = pytest.mark.processes


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ModalWorld]:
    with ModalWorld(tmp_path / "modal") as opened:
        yield opened


def made_of(world: ModalWorld, handle: ReplicaHandle) -> Any:
    """The definition that Modal was given."""
    return world.server.api.sandboxes[handle.data["id"]].definition


def dockerfiles(world: ModalWorld) -> str:
    return " ".join(wanted.decode(errors="replace") for wanted in world.server.api.images)


# Machines


def test_a_gpu_sandbox_asks_for_what_its_hardware_says(world: ModalWorld) -> None:
    executor = world.executor()
    handle = launch(executor, "exit", 0, hardware="H100:2", region="us-east")
    made = made_of(world, handle)
    assert (made.resources.gpu_config.gpu_type, made.resources.gpu_config.count) == ("H100", 2)
    assert (made.resources.milli_cpu, made.resources.memory_mb) == (2000, 16 * 1024)
    assert list(made.scheduler_placement.regions) == ["us-east"]
    assert made.timeout_secs == 24 * 3600
    assert made.name == "run-0-1"
    assert end_of(executor, handle).cause is Cause.DONE


def test_options_of_a_spec_change_the_machine(world: ModalWorld) -> None:
    options = {"gpu": "B300+:3", "cpu": 4.5, "memory_mib": 1000, "volumes": {"/data": "corpus"}}
    handle = launch(world.executor(), "exit", 0, hardware="anything", options=options)
    made = made_of(world, handle)
    assert (made.resources.gpu_config.gpu_type, made.resources.gpu_config.count) == ("B300+", 3)
    assert (made.resources.milli_cpu, made.resources.memory_mb) == (4500, 1000)
    assert [(v.mount_path, v.volume_id) for v in made.volume_mounts] == [("/data", "vo-corpus")]


def test_a_gpu_that_is_not_there_is_not_waited_for(world: ModalWorld, tmp_path: Path) -> None:
    world.server.starve()
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up", hardware="H100")
    (status,) = executor.poll([handle])
    assert (status.state, status.phase, status.started_wall_s) == (
        JobState.PENDING, "scheduling", None,
    )  # fmt: skip
    assert list(executor.logs(handle)) == []
    assert world.executor().find("run-0-1") == handle
    assert launch(world.executor(), "wait", tmp_path / "up", hardware="H100") == handle
    world.server.starve(False)
    number_in(tmp_path / "up")
    (status,) = executor.poll([handle])
    assert status.state is JobState.RUNNING
    assert status.started_wall_s is not None and status.deadline_wall_s is not None
    assert status.deadline_wall_s == status.started_wall_s + 24 * 3600
    executor.cancel([handle])
    assert end_of(executor, handle).cause is Cause.CANCELLED


def test_one_that_waits_for_a_gpu_can_be_cancelled(world: ModalWorld, tmp_path: Path) -> None:
    world.server.starve()
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up", hardware="H100")
    executor.cancel([handle])
    status = end_of(executor, handle)
    assert (status.cause, status.started_wall_s) == (Cause.CANCELLED, None)
    world.server.starve(False)
    assert launch(executor, "wait", tmp_path / "up", hardware="H100") == handle
    assert not (tmp_path / "up").exists()


def test_many_wait_for_gpus_and_their_launches_are_over(world: ModalWorld) -> None:
    world.server.starve()
    executor = world.executor()
    specs = [ReplicaSpec(launch_key=f"run-{n}-1", replica=n, hardware="A10") for n in range(12)]
    handles = executor.launch_replicas(12, "replica_stub", {"args": ["exit", 0]}, specs=specs)
    assert {s.state for s in executor.poll(handles)} == {JobState.PENDING}
    assert sorted(executor.live(), key=str) == sorted(handles, key=str)
    wait_for(lambda: world.server.connections == 1, "the launches' own clients to be closed")
    world.server.starve(False)
    assert {s.state for s in executor.collect(handles, 60)} == {JobState.ENDED}


def test_one_that_is_stopped_before_it_has_a_gpu_is_found(world: ModalWorld) -> None:
    """The SDK raises then, and the launch has a job all the same."""
    world.server.starve()
    executor = world.executor()
    with ThreadPoolExecutor(1) as pool:
        launching = pool.submit(launch, executor, "exit", 0, hardware="H100")
        wait_for(lambda: world.server.api.sandboxes, "the Sandbox")
        (sandbox_id,) = world.server.api.sandboxes
        world.server.preempt(sandbox_id, as_termination=True)
        handle = launching.result()
    assert handle == executor.find("run-0-1")
    assert end_of(executor, handle).cause is Cause.PREEMPTED


@pytest.mark.parametrize("hardware", ["cpu", "H100"])
def test_an_ended_one_is_found_by_its_key(world: ModalWorld, hardware: str) -> None:
    """The SDK's own from_name finds those with a GPU only while they live."""
    executor = world.executor()
    handle = launch(executor, "exit", 3, hardware=hardware)
    assert end_of(executor, handle).exit_code == 3
    assert world.executor().find("run-0-1") == handle
    assert launch(world.executor(), "exit", 0, hardware=hardware) == handle
    assert len(world.server.api.sandboxes) == 1


@pytest.mark.parametrize("hardware", ["cpu", "H100"])
def test_without_records_of_ended_ones_handles_still_work(
    world: ModalWorld, tmp_path: Path, hardware: str
) -> None:
    world.server.api.tells_ended = False
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up", hardware=hardware)
    number_in(tmp_path / "up")
    assert launch(world.executor(), "wait", tmp_path / "up", hardware=hardware) == handle
    assert executor.poll([handle])[0].state is JobState.RUNNING
    executor.cancel([handle])
    status = end_of(executor, handle)
    assert (status.cause, status.exit_code) == (Cause.PREEMPTED, 137)
    assert executor.find("run-0-1") is None
    over = launch(executor, "exit", 0, key="run-0-2", hardware=hardware)
    late = launch(executor, "wait", tmp_path / "b", key="run-0-3", hardware=hardware, timeout_s=1)
    assert end_of(executor, over).cause is Cause.DONE
    assert end_of(executor, late).cause is Cause.DEADLINE


def test_a_stop_from_outside_is_no_cancel(world: ModalWorld, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up", hardware="T4")
    number_in(tmp_path / "up")
    world.server.preempt(handle.data["id"], as_termination=True)
    status = end_of(executor, handle)
    assert status.cause is Cause.PREEMPTED
    assert "stopped from outside" in status.message


def test_many_living_ones_are_on_several_pages(world: ModalWorld, tmp_path: Path) -> None:
    executor = world.executor()
    world.server.starve()
    specs = [ReplicaSpec(launch_key=f"run-{n}-1", replica=n, hardware="L4") for n in range(25)]
    with ThreadPoolExecutor(25) as pool:
        list(pool.map(lambda spec: _queue(executor, spec), specs))
    live = executor.live()
    assert sorted(handle.launch_key for handle in live) == sorted(s.launch_key for s in specs)
    before = world.requests()
    assert {status.state for status in executor.poll(live)} == {JobState.PENDING}
    assert world.requests() - before == 4


def _queue(executor: ModalExecutor, spec: ReplicaSpec) -> None:
    executor.launch_replicas(1, "replica_stub", {"args": ["exit", 0]}, specs=[spec])


# Names, tags, secrets


def test_tags_are_what_modal_takes(world: ModalWorld) -> None:
    labels = {"run name": "a model, ü and 100 %", "note": "x" * 80}
    handle = launch(world.executor(), "exit", 0, labels=labels)
    tags = world.server.api.sandboxes[handle.data["id"]].tags
    assert tags == {
        "run-name": "a-model----and-100--",
        "note": "x" * 63,
        "archipelago-deployment": "contract",
        "archipelago-key": "run-0-1",
        "archipelago-replica": "0",
    }


@pytest.mark.parametrize("hardware", ["cpu", "H100"])
def test_secrets_travel_as_secrets(world: ModalWorld, hardware: str) -> None:
    handle = launch(
        world.executor(), "digests", "TOKEN", hardware=hardware, secrets={"TOKEN": "s3cr3t-41c"}
    )
    assert "s3cr3t-41c" not in world.description(handle)
    assert end_of(world.executor(), handle).exit_code == 0


def test_the_name_of_another_deployment_is_not_taken_for_ours(world: ModalWorld) -> None:
    theirs = world.executor(app="shared", deployment="theirs")
    handle = launch(theirs, "env", key="run-0-1", hardware="H100")
    ours = world.executor(app="shared")
    world.server.starve()
    queued = launch(theirs, "env", key="run-0-2", hardware="H100")
    with pytest.raises(LaunchRefused, match=r"not ours.*option app"):
        launch(ours, "env", key="run-0-2", hardware="H100")
    assert ours.find("run-0-1") is None
    assert ours.live() == []
    assert theirs.live() == [queued]
    assert end_of(theirs, handle).cause is Cause.DONE


def test_nothing_is_made_by_asking(world: ModalWorld) -> None:
    executor = world.executor()
    assert executor.find("run-0-1") is None
    assert executor.live() == []
    assert executor.preflight(ReplicaSpec(launch_key="run-0-1", replica=0), 1) == []
    assert world.server.api.apps == {}


# Images


def test_requirements_of_the_code_are_in_the_image_of_our_making(world: ModalWorld) -> None:
    executor = world.executor(extra_index_url="https://example.org/simple")
    code = CodeRef(uri="file:///nowhere", sha256="0" * 64, requirements=("numpy==2.5.5",))
    for key in ("run-0-1", "run-0-2"):
        spec = ReplicaSpec(launch_key=key, replica=0)
        (handle,) = executor.launch_replicas(1, "x", specs=[spec], code=code)
        end_of(executor, handle)
    asked = dockerfiles(world)
    assert "python:3.12" in asked
    assert "numpy==2.5.5" in asked and "https://example.org/simple" in asked
    assert len(world.server.api.images) == 2  # the base and one layer, once


def test_somebodys_own_image_is_left_as_it_is(world: ModalWorld) -> None:
    world.server.api.named_secrets["registry"] = {
        "REGISTRY_USERNAME": "me",
        "REGISTRY_PASSWORD": "mine",
    }
    executor = world.executor(registry_secret="registry")
    code = CodeRef(uri="file:///nowhere", sha256="0" * 64, requirements=("numpy==2.5.5",))
    spec = ReplicaSpec(launch_key="run-0-1", replica=0, image="ghcr.io/me/mine:7")
    executor.launch_replicas(1, "x", specs=[spec], code=code)
    assert "ghcr.io/me/mine:7" in dockerfiles(world)
    assert "numpy" not in dockerfiles(world)
    with_them = dataclasses.replace(
        spec, launch_key="run-0-2", options={"requirements": ["fsspec==2026.9.0"]}
    )
    executor.launch_replicas(1, "x", specs=[with_them], code=code)
    assert "fsspec==2026.9.0" in dockerfiles(world)


def test_an_image_that_takes_long_is_not_waited_for(world: ModalWorld) -> None:
    world.server.build(building=True)
    executor = world.executor(build_timeout_s=0.3)
    with pytest.raises(RetryLater, match="still building the image") as caught:
        launch(executor, "exit", 0)
    assert caught.value.after_s
    assert world.server.api.sandboxes == {}
    world.server.build()
    assert end_of(executor, launch(executor, "exit", 0)).cause is Cause.DONE


def test_an_image_that_cannot_be_built_is_refused_with_the_reason(world: ModalWorld) -> None:
    world.server.build(error="No matching distribution found for nonsense==1")
    with pytest.raises(LaunchRefused, match="No matching distribution found for nonsense==1"):
        launch(world.executor(requirements=["nonsense==1"]), "exit", 0)


# Accounts, processes, threads


def test_accounts_of_one_process_do_not_mix(world: ModalWorld, tmp_path: Path) -> None:
    with ModalServer(tmp_path / "other", token=("ak-other", "as-other")) as other:
        one = world.executor()
        two = ModalExecutor(
            config(
                credentials={
                    "MODAL_SERVER_URL": other.url,
                    "MODAL_TOKEN_ID": "ak-other",
                    "MODAL_TOKEN_SECRET": "as-other",
                }
            )
        )
        first, second = launch(one, "exit", 0), launch(two, "exit", 4, hardware="H100")
        assert end_of(one, first).exit_code == 0
        assert end_of(two, second).exit_code == 4
        assert one.poll([second])[0].cause is Cause.LOST
        assert len(other.api.sandboxes) == 1


def test_a_token_of_the_environment_serves_where_none_is_given(
    world: ModalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODAL_SERVER_URL", world.server.url)
    monkeypatch.setenv("MODAL_TOKEN_ID", world.server.token[0])
    monkeypatch.setenv("MODAL_TOKEN_SECRET", world.server.token[1])
    assert "emulated" in ModalExecutor(config()).check()


@pytest.mark.parametrize("given", [{}, {"MODAL_TOKEN_ID": "ak-half"}])
def test_without_a_token_a_person_is_asked(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.setenv(name, "")
    executor = ModalExecutor(config(credentials=given))
    with pytest.raises(NeedsPerson, match="MODAL_TOKEN_ID"):
        executor.check()
    (problem,) = executor.preflight(ReplicaSpec(launch_key="run-0-1", replica=0), 1)
    assert problem.field == "credential"


def test_it_works_on_after_a_fork(world: ModalWorld) -> None:
    """Celery forks its workers. The SDK tries to mend a client it finds in a child, and advises to
    make another."""
    executor = world.executor()
    handle = launch(executor, "exit", 5)
    assert end_of(executor, handle).exit_code == 5
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def in_child() -> None:
        parents = executor._account._client
        (status,) = executor.poll([handle])
        theirs.send((status.exit_code, executor._account._client is not parents))

    child = fork.Process(target=in_child)
    child.start()
    try:
        assert ours.poll(60), "the child answers nothing"
        assert ours.recv() == (5, True)
    finally:
        child.kill()
        child.join()
    assert executor.poll([handle])[0].exit_code == 5


def test_it_works_in_many_threads_and_beside_a_running_loop(world: ModalWorld) -> None:
    executor = world.executor()
    handle = launch(executor, "exit", 0)
    end_of(executor, handle)
    fresh, before = world.executor(), world.server.connections
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: fresh.poll([handle])[0].cause, range(32)))
    assert found == [Cause.DONE] * 32
    assert world.server.connections == before + 1

    async def beside() -> Cause | None:
        return executor.poll([handle])[0].cause

    assert asyncio.run(beside()) is Cause.DONE


def test_an_environment_nobody_has_is_said(world: ModalWorld) -> None:
    executor = world.executor(environment="no-such-one")
    (problem,) = executor.preflight(ReplicaSpec(launch_key="run-0-1", replica=0), 1)
    assert problem.field == "options" and "no-such-one" in problem.message


def test_environments_are_apart(world: ModalWorld) -> None:
    staging = world.executor(environment="staging")
    handle = launch(staging, "exit", 0)
    assert world.executor().find("run-0-1") is None
    assert world.executor(environment="staging").find("run-0-1") == handle
    assert "staging" in staging.check()
    end_of(staging, handle)


# Refusals


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Insufficient capacity to create sandbox.", RetryLater),
        ("Rate limit exceeded", RetryLater),
        ("Workspace spend limit reached", NeedsPerson),
    ],
)
def test_one_status_of_modals_means_several_things(
    world: ModalWorld, said: str, kind: type[Exception]
) -> None:
    world.refuse_quota(said)
    with pytest.raises(kind) as caught:
        launch(world.executor(), "exit", 0, hardware="H100")
    assert said in str(caught.value)
    assert type(caught.value) is kind


def test_a_server_that_was_never_there_is_given_up(world: ModalWorld) -> None:
    """The SDK goes on for a minute by itself."""
    world.stop()
    executor = world.impatient()
    calls: list[Callable[[], object]] = [
        executor.check,
        executor.live,
        lambda: launch(executor, "exit", 0, hardware="H100"),
    ]
    for call in calls:
        with pytest.raises(RetryLater):
            call()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"colour": "red"}, "expected app, environment"),
        ({"cpu": 0}, "option cpu: expected more than 0, found 0"),
        ({"memory_mib": 1.5}, "option memory_mib: expected a whole number, found 1.5"),
        ({"requirements": "torch"}, "expected a list of pip requirements, found 'torch'"),
        ({"volumes": {"data": "corpus"}}, "absolute paths"),
        ({"app": "a b"}, "option app: expected 1 to 63 letters"),
        ({"image": 3}, "option image: expected a text, found 3"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(LaunchRefused, match=said):
        ModalExecutor(config(**options))


def test_a_spec_cannot_change_what_is_the_executors(world: ModalWorld) -> None:
    with pytest.raises(LaunchRefused, match="app: expected in the executor's options"):
        launch(world.executor(), "exit", 0, options={"app": "other"})


def test_a_deployment_names_an_app() -> None:
    with pytest.raises(LaunchRefused, match="deployment: expected"):
        ModalExecutor(config(deployment="my deployment"))


def test_a_lifetime_that_modal_refuses_is_refused_before(world: ModalWorld) -> None:
    with pytest.raises(LaunchRefused, match="timeout_s: expected at most 86400"):
        launch(world.executor(), "exit", 0, timeout_s=90_000)
    with contextlib.suppress(LaunchRefused):
        launch(world.executor(), "exit", 0, timeout_s=0)
    assert world.server.api.sandboxes == {}


def test_a_position_that_is_none_of_ours_is_refused(world: ModalWorld) -> None:
    executor = world.executor()
    handle = launch(executor, "exit", 0)
    with pytest.raises(ValueError, match="log position"):
        list(executor.logs(handle, after="yesterday"))
    end_of(executor, handle)
