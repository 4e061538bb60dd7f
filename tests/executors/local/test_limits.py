"""Local replicas' limits: memory, niceness, a deadline, a GPU each."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from executors.base import Cause, LaunchRefused, ReplicaHandle, ReplicaSpec, RetryLater
from executors.local import shim
from executors.local.executor import LocalProcessExecutor
from executors.local.gpus import gpus_of
from tests.executors.harnesses import config, end_of, launch, number_in, text_of

pytestmark = pytest.mark.processes

HOG_MIB = 400


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "state"
    executor = local(tmp_path / "state", grace_s=0)
    left = executor.live()
    executor.cancel(left)
    executor.collect(left, 30)


def local(state: Path, **options: Any) -> LocalProcessExecutor:
    return LocalProcessExecutor(config(state, **options))


def expire(executor: LocalProcessExecutor, handle: ReplicaHandle) -> None:
    """Deliver the signal of the timer that a shim sets for the deadline."""
    record = json.loads((executor.root / handle.launch_key / "handle.json").read_text())
    os.kill(record["pid"], signal.SIGALRM)


def environment_of(executor: LocalProcessExecutor, **spec: Any) -> dict[str, str]:
    handle = launch(executor, "env", **spec)
    end_of(executor, handle)
    seen: dict[str, str] = json.loads("".join(text_of(executor, handle)))
    return seen


def test_a_replica_above_its_memory_limit_is_killed(state: Path, tmp_path: Path) -> None:
    executor = local(state, memory_mb=100)
    status = end_of(executor, launch(executor, "hog", tmp_path / "up", HOG_MIB))
    assert status.cause is Cause.OUT_OF_MEMORY
    assert "more than its limit of 100 MiB" in status.message
    assert status.exit_code == -signal.SIGKILL


def test_memory_of_child_processes_counts(state: Path, tmp_path: Path) -> None:
    executor = local(state, memory_mb=100)
    status = end_of(executor, launch(executor, "hog-child", tmp_path / "up", HOG_MIB))
    assert status.cause is Cause.OUT_OF_MEMORY


def test_a_replica_within_its_limit_continues(state: Path, tmp_path: Path) -> None:
    executor = local(state, memory_mb=2000)
    handle = launch(executor, "hog", tmp_path / "up", 10)
    lines = executor.logs(handle, follow=True)
    assert next(lines).text == "10"
    executor.cancel([handle])
    assert end_of(executor, handle).cause is Cause.CANCELLED
    assert end_of(executor, launch(executor, "exit", 3, key="run-1-1")).cause is Cause.ERROR


@pytest.mark.parametrize("name", ["MemoryError", "torch.OutOfMemoryError: CUDA out of memory."])
def test_an_out_of_memory_error_is_recognized(state: Path, name: str) -> None:
    executor = local(state)
    status = end_of(executor, launch(executor, "exit", 1, "Traceback:", name))
    assert (status.cause, status.exit_code) == (Cause.OUT_OF_MEMORY, 1)
    output = f"expected no {name}"
    other = end_of(executor, launch(executor, "exit", 1, "Traceback:", output, key="run-1-1"))
    assert other.cause is Cause.ERROR


def test_an_out_of_memory_kill_by_the_kernel_is_recognized(
    state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The machine's OOM counter increased during the replica's life."""
    counts = iter((4, 5))
    monkeypatch.setattr(shim, "kernel_kills", lambda: next(counts))
    # The shim runs in this process, whose other children are the servers of the test session.
    monkeypatch.setattr(shim, "descendants", lambda *, outside=None: [])
    folder = tmp_path / "job"
    folder.mkdir()
    job = {"command": ["sh", "-c", "kill -9 $$"], "grace_s": 1, "timeout_s": None}
    (folder / "job.json").write_text(json.dumps({**job, "memory_bytes": None, "nice": 0}))
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)}
    try:
        shim.Shim(folder).run()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    end = json.loads((folder / "exit.json").read_text())
    assert (end["exit_code"], end["ended_by"]) == (-9, "memory")
    assert "kernel" in end["message"]


def test_the_kernel_counts_its_kills() -> None:
    assert shim.kernel_kills() >= 0
    assert shim.memory_of(os.getpid()) > 1 << 20
    assert shim.memory_of(2**22 + 1) == 0


def test_niceness_is_added_to_the_server_s(state: Path, tmp_path: Path) -> None:
    executor = local(state, nice=3)
    handle = launch(executor, "wait", tmp_path / "up")
    assert psutil.Process(number_in(tmp_path / "up")).nice() == psutil.Process().nice() + 3
    executor.cancel([handle])
    end_of(executor, handle)


def test_at_the_deadline_a_replica_gets_sigterm_then_sigkill(state: Path, tmp_path: Path) -> None:
    executor = local(state, grace_s=60)
    polite = launch(executor, "polite", tmp_path / "polite", key="run-0-1", timeout_s=3600)
    impatient = local(state, grace_s=0.2)
    deaf = launch(impatient, "deaf", tmp_path / "deaf", key="run-1-1", timeout_s=3600)
    number_in(tmp_path / "polite"), number_in(tmp_path / "deaf")
    for handle in (polite, deaf):
        expire(executor, handle)
    assert (end_of(executor, polite).cause, end_of(executor, polite).exit_code) == ("deadline", 0)
    status = end_of(executor, deaf)
    assert (status.cause, status.exit_code) == (Cause.DEADLINE, -9)
    assert "3600 s after its start" in status.message


def test_a_replica_on_the_cpu_sees_no_gpu(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert environment_of(local(state))["CUDA_VISIBLE_DEVICES"] == ""


def test_each_replica_gets_a_separate_gpu(state: Path, tmp_path: Path) -> None:
    executor = local(state, gpus=["4", "GPU-7f"], grace_s=0)
    first = launch(executor, "wait", tmp_path / "first", key="run-0-1", hardware="gpu")
    second = environment_of(executor, key="run-1-1", hardware="gpu")
    assert second["CUDA_VISIBLE_DEVICES"] == "GPU-7f"
    # released at its end
    third = launch(executor, "wait", tmp_path / "third", key="run-2-1", hardware="gpu")
    with pytest.raises(RetryLater, match=r"4, GPU-7f\) are taken"):
        launch(local(state, gpus="4,GPU-7f"), "exit", 0, key="run-3-1", hardware="gpu")
    assert executor.find("run-3-1") is None
    executor.cancel([first])
    end_of(executor, first)
    again = environment_of(executor, key="run-3-1", hardware="gpu")
    assert again["CUDA_VISIBLE_DEVICES"] == "4"
    executor.cancel([third])
    end_of(executor, third)


def test_a_gpu_request_without_gpus_is_refused(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = local(state, gpus=[])
    with pytest.raises(LaunchRefused, match="no GPU"):
        launch(executor, "exit", 0, hardware="gpu")
    spec = ReplicaSpec(launch_key="run-0-1", replica=0, hardware="gpu")
    (problem,) = executor.preflight(spec, 1)
    assert problem.field == "hardware" and "found 1" in problem.message
    assert local(state, gpus="0,1").preflight(spec, 2) == []


def test_gpus_are_named_by_options_or_environment_or_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = --query-gpu=index ] && printf "0\\n1\\n2\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpus_of({}) == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 1")
    assert gpus_of({}) == ["2", "1"]
    assert gpus_of({"gpus": [0]}) == ["0"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    program.write_text("#!/bin/sh\nexit 9\n")
    assert gpus_of({}) == []


@pytest.mark.parametrize(
    ("options", "output"),
    [
        ({"memory_mb": 0}, "memory_mb: expected a number of at least 1 MiB, found 0"),
        ({"memory_mb": "4G"}, "found '4G'"),
        ({"nice": -1}, "nice: expected a whole number of at least 0 and at most 19"),
        ({"memory": 3}, "expected memory_mb, nice, grace_s, gpus, found memory"),
    ],
)
def test_invalid_options_are_named(state: Path, options: dict[str, object], output: str) -> None:
    spec = ReplicaSpec(launch_key="run-0-1", replica=0)
    (problem,) = local(state, **options).preflight(spec, 1)
    assert problem.field == "options" and output in problem.message
    with pytest.raises(LaunchRefused) as caught:
        launch(local(state), "exit", 0, options=options)
    assert output in str(caught.value)
    assert local(state).live() == []


def test_options_of_a_replica_precede_those_of_the_executor(state: Path, tmp_path: Path) -> None:
    executor = local(state, memory_mb=100)
    handle = launch(
        executor, "hog", tmp_path / "up", HOG_MIB, options={"memory_mb": 5000, "grace_s": 0}
    )
    assert next(executor.logs(handle, follow=True)).text == str(HOG_MIB)
    executor.cancel([handle])
    end_of(executor, handle)


def test_a_state_dir_is_required() -> None:
    with pytest.raises(ValueError, match="state_dir"):
        LocalProcessExecutor(config())


def test_check_describes_this_machine(state: Path) -> None:
    assert "cores" in local(state, gpus="0").check()
    assert "1 GPU" in local(state, gpus="0").check()
