"""Modal's images, several accounts in one process, and refusals."""

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
    AccountError,
    Cause,
    CodeRef,
    LaunchRefused,
    NoCapacity,
    ReplicaSpec,
    RetryLater,
)
from executors.modal.executor import ModalExecutor
from tests.emulators.modal import ModalServer
from tests.executors.harnesses import config, end_of, launch
from tests.executors.modal.harness import ModalHarness

pytestmark = pytest.mark.processes


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[ModalHarness]:
    with ModalHarness(tmp_path / "modal") as opened:
        yield opened


def dockerfiles(harness: ModalHarness) -> str:
    return " ".join(wanted.decode(errors="replace") for wanted in harness.server.api.images)


# Images


def test_the_built_image_has_the_requirements_of_the_code(harness: ModalHarness) -> None:
    executor = harness.executor(extra_index_url="https://example.org/simple")
    code = CodeRef(uri="file:///nowhere", sha256="0" * 64, requirements=("numpy==2.5.5",))
    for key in ("run-0-1", "run-0-2"):
        spec = ReplicaSpec(launch_key=key, replica=0)
        (handle,) = executor.launch_replicas(1, "x", specs=[spec], code=code)
        end_of(executor, handle)
    requested = dockerfiles(harness)
    assert "python:3.12" in requested
    assert "numpy==2.5.5" in requested and "https://example.org/simple" in requested
    assert len(harness.server.api.images) == 2  # the base and one layer, once


def test_a_custom_image_is_not_changed(harness: ModalHarness) -> None:
    harness.server.api.named_secrets["registry"] = {
        "REGISTRY_USERNAME": "me",
        "REGISTRY_PASSWORD": "mine",
    }
    executor = harness.executor(registry_secret="registry")
    code = CodeRef(uri="file:///nowhere", sha256="0" * 64, requirements=("numpy==2.5.5",))
    spec = ReplicaSpec(launch_key="run-0-1", replica=0, image="ghcr.io/me/mine:7")
    executor.launch_replicas(1, "x", specs=[spec], code=code)
    assert "ghcr.io/me/mine:7" in dockerfiles(harness)
    assert "numpy" not in dockerfiles(harness)
    with_them = dataclasses.replace(
        spec, launch_key="run-0-2", options={"requirements": ["fsspec==2026.9.0"]}
    )
    executor.launch_replicas(1, "x", specs=[with_them], code=code)
    assert "fsspec==2026.9.0" in dockerfiles(harness)


def test_a_slow_image_build_is_retried_later(harness: ModalHarness) -> None:
    harness.server.build(building=True)
    executor = harness.executor(build_timeout_s=0.3)
    with pytest.raises(RetryLater, match="still building the image") as caught:
        launch(executor, "exit", 0)
    assert caught.value.after_s
    assert harness.server.api.sandboxes == {}
    harness.server.build()
    assert end_of(executor, launch(executor, "exit", 0)).cause is Cause.DONE


def test_an_image_that_cannot_be_built_is_refused_with_the_reason(harness: ModalHarness) -> None:
    harness.server.build(error="No matching distribution found for nonsense==1")
    with pytest.raises(LaunchRefused, match="No matching distribution found for nonsense==1"):
        launch(harness.executor(requirements=["nonsense==1"]), "exit", 0)


# Accounts, processes, threads


def test_accounts_of_one_process_do_not_mix(harness: ModalHarness, tmp_path: Path) -> None:
    with ModalServer(tmp_path / "other", token=("ak-other", "as-other")) as other:
        one = harness.executor()
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


def test_the_token_of_the_environment_is_the_default(
    harness: ModalHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODAL_SERVER_URL", harness.server.url)
    monkeypatch.setenv("MODAL_TOKEN_ID", harness.server.token[0])
    monkeypatch.setenv("MODAL_TOKEN_SECRET", harness.server.token[1])
    assert "emulated" in ModalExecutor(config()).check()


@pytest.mark.parametrize("given", [{}, {"MODAL_TOKEN_ID": "ak-half"}])
def test_a_missing_token_requires_intervention(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.setenv(name, "")
    executor = ModalExecutor(config(credentials=given))
    with pytest.raises(AccountError, match="MODAL_TOKEN_ID"):
        executor.check()
    (problem,) = executor.preflight(ReplicaSpec(launch_key="run-0-1", replica=0), 1)
    assert problem.field == "credential"


def test_the_executor_works_after_a_fork(harness: ModalHarness) -> None:
    """Celery forks its workers. A client does not survive a fork, so a new one is created."""
    executor = harness.executor()
    handle = launch(executor, "exit", 5)
    assert end_of(executor, handle).exit_code == 5
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe()

    def in_child() -> None:
        parents = executor._account._client
        (status,) = executor.poll([handle])
        sender.send((status.exit_code, executor._account._client is not parents))

    child = fork.Process(target=in_child)
    child.start()
    try:
        assert receiver.poll(60), "the child sends no result"
        assert receiver.recv() == (5, True)
    finally:
        child.kill()
        child.join()
    assert executor.poll([handle])[0].exit_code == 5


def test_the_executor_works_in_many_threads_and_with_a_running_event_loop(
    harness: ModalHarness,
) -> None:
    executor = harness.executor()
    handle = launch(executor, "exit", 0)
    end_of(executor, handle)
    fresh, before = harness.executor(), harness.server.connections
    with ThreadPoolExecutor(16) as pool:
        result = list(pool.map(lambda _: fresh.poll([handle])[0].cause, range(32)))
    assert result == [Cause.DONE] * 32
    assert harness.server.connections == before + 1

    async def beside() -> Cause | None:
        return executor.poll([handle])[0].cause

    assert asyncio.run(beside()) is Cause.DONE


def test_an_unknown_environment_is_named(harness: ModalHarness) -> None:
    executor = harness.executor(environment="no-such-one")
    (problem,) = executor.preflight(ReplicaSpec(launch_key="run-0-1", replica=0), 1)
    assert problem.field == "options" and "no-such-one" in problem.message


def test_environments_are_separate(harness: ModalHarness) -> None:
    staging = harness.executor(environment="staging")
    handle = launch(staging, "exit", 0)
    assert harness.executor().find("run-0-1") is None
    assert harness.executor(environment="staging").find("run-0-1") == handle
    assert "staging" in staging.check()
    end_of(staging, handle)


# Refusals


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Insufficient capacity to create sandbox.", NoCapacity),
        ("Rate limit exceeded", RetryLater),
        ("Workspace spend limit reached", AccountError),
    ],
)
def test_refusals_are_classified_by_their_message(
    harness: ModalHarness, text: str, kind: type[Exception]
) -> None:
    harness.refuse_quota(text)
    with pytest.raises(kind) as caught:
        launch(harness.executor(), "exit", 0, hardware="H100")
    assert text in str(caught.value)
    assert type(caught.value) is kind


@pytest.mark.parametrize("quoted", ["as-emulated", "s3cr3t-77b"])
def test_secrets_in_modals_messages_are_masked(harness: ModalHarness, quoted: str) -> None:
    harness.refuse_quota(f"the plan allows no {quoted} here")
    with pytest.raises(AccountError) as caught:
        launch(harness.executor(), "exit", 0, secrets={"TOKEN": "s3cr3t-77b"})
    shown = "".join(traceback.format_exception(caught.value))
    assert "the plan allows no *** here" in shown
    assert f"the plan allows no {quoted} here" not in shown


def test_an_unreachable_server_is_given_up(harness: ModalHarness) -> None:
    """The SDK alone would retry for a minute."""
    harness.stop()
    executor = harness.impatient()
    calls: list[Callable[[], object]] = [
        executor.check,
        executor.live,
        lambda: launch(executor, "exit", 0, hardware="H100"),
    ]
    for call in calls:
        with pytest.raises(RetryLater):
            call()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"colour": "red"}, "expected app, environment"),
        ({"cpu": 0}, "cpu: expected a number above 0 physical cores, found 0"),
        ({"memory_mib": 1.5}, "memory_mib: expected a whole number above 0 MiB, found 1.5"),
        ({"requirements": "torch"}, "expected a list of texts, found 'torch'"),
        ({"volumes": {"data": "corpus"}}, "absolute paths"),
        ({"app": "a b"}, "app: expected 1 to 63 letters"),
        ({"image": 3}, "image: expected a text, found 3"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(LaunchRefused, match=text):
        ModalExecutor(config(**options))


def test_a_spec_cannot_change_options_of_the_executor(harness: ModalHarness) -> None:
    with pytest.raises(LaunchRefused, match="app: expected in the executor's options"):
        launch(harness.executor(), "exit", 0, options={"app": "other"})


def test_a_deployment_names_an_app() -> None:
    with pytest.raises(LaunchRefused, match="deployment: expected"):
        ModalExecutor(config(deployment="my deployment"))


def test_a_lifetime_above_modals_limit_is_refused_before_the_launch(harness: ModalHarness) -> None:
    with pytest.raises(LaunchRefused, match="timeout_s: expected more than 0 and at most 86400"):
        launch(harness.executor(), "exit", 0, timeout_s=90_000)
    with contextlib.suppress(LaunchRefused):
        launch(harness.executor(), "exit", 0, timeout_s=0)
    assert harness.server.api.sandboxes == {}


def test_a_foreign_position_is_refused(harness: ModalHarness) -> None:
    executor = harness.executor()
    handle = launch(executor, "exit", 0)
    with pytest.raises(ValueError, match="log position"):
        list(executor.logs(handle, after="yesterday"))
    end_of(executor, handle)
