"""Modal's images, several accounts in one process, and what is refused before or by it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from executors.base import (
    Cause,
    CodeRef,
    LaunchRefused,
    NeedsPerson,
    NoCapacity,
    ReplicaSpec,
    RetryLater,
)
from executors.modal.executor import ModalExecutor
from tests.emulators.modal import ModalServer
from tests.executors.modal.world import ModalWorld
from tests.executors.worlds import config, end_of, launch

pytestmark = pytest.mark.processes


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ModalWorld]:
    with ModalWorld(tmp_path / "modal") as opened:
        yield opened


def dockerfiles(world: ModalWorld) -> str:
    return " ".join(wanted.decode(errors="replace") for wanted in world.server.api.images)


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
        ("Insufficient capacity to create sandbox.", NoCapacity),
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


@pytest.mark.parametrize("quoted", ["as-emulated", "s3cr3t-77b"])
def test_what_modal_quotes_of_our_secrets_is_not_repeated(world: ModalWorld, quoted: str) -> None:
    world.refuse_quota(f"the plan allows no {quoted} here")
    with pytest.raises(NeedsPerson) as caught:
        launch(world.executor(), "exit", 0, secrets={"TOKEN": "s3cr3t-77b"})
    shown = "".join(traceback.format_exception(caught.value))
    assert "the plan allows no *** here" in shown
    assert f"the plan allows no {quoted} here" not in shown


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
