"""The local executor with real processes. Tests wait for events, with a generous timeout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from executors.base import Cause, JobState, LaunchRefused, ReplicaHandle
from executors.local import shim
from executors.local.executor import LocalProcessExecutor
from executors.local.options import GRACE_S
from tests.executors.harnesses import (
    HERE,
    LIMIT_S,
    config,
    end_of,
    is_gone,
    launch,
    number_in,
    stub_env,
    text_of,
    wait_for,
    wait_for_text,
)

REPOSITORY = HERE.parent.parent

pytestmark = pytest.mark.processes


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[LocalProcessExecutor]:
    made = LocalProcessExecutor(config(tmp_path, grace_s=30))
    yield made
    left = made.live()
    made.cancel(left)
    for status in made.collect(left, LIMIT_S):
        assert status.state is JobState.ENDED


def shim_of(executor: LocalProcessExecutor, handle: ReplicaHandle) -> int:
    path = executor.root / handle.launch_key / "handle.json"
    wait_for(path.exists, "the shim")
    return int(json.loads(path.read_text())["pid"])


def test_it_inherits_store_variables_and_no_server_secrets(
    executor: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DATABASE_URL", "secret")
    monkeypatch.setenv("ARCHIPELAGO_SECRET_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    handle = launch(executor, "env")
    end_of(executor, handle)
    env = json.loads("".join(text_of(executor, handle)))
    assert (env["AWS_REGION"], env["PYTHONPYCACHEPREFIX"]) == ("eu-north-1", str(tmp_path))
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "1"
    assert "PATH" in env
    assert "DATABASE_URL" not in env
    assert "ARCHIPELAGO_SECRET_KEY" not in env


def test_a_bucket_s_secrets_are_not_mixed_with_what_is_inherited(
    executor: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "FSSPEC_S3_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "inherited")
    secrets = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    (handle,) = executor.launch_replicas(
        1, "replica_stub", {"args": ["env"]}, env=stub_env(), secrets=secrets
    )
    end_of(executor, handle)
    env = json.loads("".join(text_of(executor, handle)))
    assert {name: env[name] for name in env if name in secrets} == secrets
    assert not {"AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "FSSPEC_S3_KEY"} & set(env)
    assert env["HF_TOKEN"] == "inherited"


def test_a_given_thread_count_takes_precedence(executor: LocalProcessExecutor) -> None:
    (handle,) = executor.launch_replicas(
        1, "replica_stub", {"args": ["env"]}, env={**stub_env(), "OMP_NUM_THREADS": "2"}
    )
    end_of(executor, handle)
    assert json.loads("".join(text_of(executor, handle)))["OMP_NUM_THREADS"] == "2"


def test_a_clean_end_is_done_and_dated(executor: LocalProcessExecutor) -> None:
    status = end_of(executor, launch(executor, "exit", 0))
    assert (status.cause, status.exit_code, status.message) == (Cause.DONE, 0, "")
    assert status.started_wall_s is not None and status.ended_wall_s is not None
    assert status.started_wall_s <= status.ended_wall_s


def test_an_error_carries_its_code_and_the_last_lines_of_the_log(
    executor: LocalProcessExecutor,
) -> None:
    status = end_of(executor, launch(executor, "exit", 75, *range(30), "the reason"))
    assert (status.cause, status.exit_code) == (Cause.ERROR, 75)
    assert status.message.startswith("ended with exit code 75")
    assert status.message.endswith("the reason")
    assert "\n5\n" not in status.message


def test_a_missing_module_is_an_error_that_names_it(executor: LocalProcessExecutor) -> None:
    (handle,) = executor.launch_replicas(1, "no_such_module_at_all", env=stub_env())
    status = end_of(executor, handle)
    assert status.cause is Cause.ERROR
    assert "no_such_module_at_all" in status.message


def test_a_killed_replica_is_an_error_with_its_signal(executor: LocalProcessExecutor) -> None:
    status = end_of(executor, launch(executor, "kill", int(signal.SIGKILL)))
    assert (status.cause, status.exit_code) == (Cause.ERROR, -9)
    assert status.message.startswith("killed with SIGKILL (not an out-of-memory kill)")


def test_a_crash_is_an_error_with_its_signal(executor: LocalProcessExecutor) -> None:
    status = end_of(executor, launch(executor, "kill", int(signal.SIGSEGV)))
    assert (status.cause, status.exit_code) == (Cause.ERROR, -11)
    assert "SIGSEGV" in status.message


def test_cancel_twice_ends_it_once(executor: LocalProcessExecutor, tmp_path: Path) -> None:
    handle = launch(executor, "wait", tmp_path / "up")
    pid = number_in(tmp_path / "up")
    executor.cancel([handle])
    executor.cancel([handle])
    status = end_of(executor, handle)
    assert (status.cause, status.exit_code) == (Cause.CANCELLED, -15)
    assert is_gone(pid)
    executor.cancel([handle])
    assert end_of(executor, handle) == status


def test_a_replica_that_exits_on_sigterm(executor: LocalProcessExecutor, tmp_path: Path) -> None:
    handle = launch(executor, "polite", tmp_path / "up")
    number_in(tmp_path / "up")
    executor.cancel([handle])
    status = end_of(executor, handle)
    assert (status.cause, status.exit_code) == (Cause.CANCELLED, 0)


def test_a_replica_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    executor = LocalProcessExecutor(config(tmp_path, grace_s=0.2))
    handle = launch(executor, "deaf", tmp_path / "up")
    pid = number_in(tmp_path / "up")
    executor.cancel([handle])
    status = end_of(executor, handle)
    assert (status.cause, status.exit_code) == (Cause.CANCELLED, -9)
    assert is_gone(pid)


def test_a_cancel_before_the_start_is_kept(executor: LocalProcessExecutor, tmp_path: Path) -> None:
    """The canceller writes its file first, so a starting shim cannot miss it."""
    folder = executor.root / "run-0-1"
    folder.mkdir(parents=True)
    executor.cancel([ReplicaHandle(backend="local", launch_key="run-0-1")])
    status = end_of(executor, launch(executor, "wait", tmp_path / "up"))
    assert (status.cause, status.exit_code) == (Cause.CANCELLED, None)
    assert not (tmp_path / "up").exists()


def test_remaining_processes_of_a_replica_are_killed(
    executor: LocalProcessExecutor, tmp_path: Path
) -> None:
    status = end_of(executor, launch(executor, "child", tmp_path / "inner"))
    assert status.cause is Cause.DONE
    inner = number_in(tmp_path / "inner")
    wait_for(lambda: is_gone(inner), "the replica's own child to end")


def test_another_process_finds_polls_and_cancels_it(
    executor: LocalProcessExecutor, tmp_path: Path
) -> None:
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    code = (
        "import sys; from pathlib import Path; from executors.base import ExecutorConfig\n"
        "from executors.local.executor import LocalProcessExecutor\n"
        "e = LocalProcessExecutor(ExecutorConfig(state_dir=Path(sys.argv[1])))\n"
        "h = e.find(sys.argv[2])\n"
        "print(h.to_json(), e.poll([h])[0].state); e.cancel([h])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code, executor.root.parent, handle.launch_key],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output.strip() == f"{handle.to_json()} running"
    assert end_of(executor, handle).cause is Cause.CANCELLED


_RACER = """
import sys
from pathlib import Path
from executors.base import ExecutorConfig, ReplicaSpec
from executors.local.executor import LocalProcessExecutor
print("ready", flush=True)
sys.stdin.readline()
e = LocalProcessExecutor(ExecutorConfig(state_dir=Path(sys.argv[1])))
e.launch_replicas(1, "replica_stub", {"args": ["count", sys.argv[2]]},
                  specs=[ReplicaSpec(launch_key="raced", replica=0)],
                  env={"PYTHONPATH": sys.argv[3]})
print("launched", flush=True)
"""


def test_one_key_launched_by_many_processes_at_once_is_one_job(
    executor: LocalProcessExecutor, tmp_path: Path
) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, executor.root.parent, tmp_path / "starts", HERE],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(6)
    ]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == b"ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write(b"\n")
        racer.stdin.flush()
    for racer in racers:
        out, _ = racer.communicate(timeout=LIMIT_S)
        assert (racer.returncode, out) == (0, b"launched\n")
    wait_for_text(tmp_path / "starts")
    handle = executor.find("raced")
    assert handle is not None
    executor.cancel([handle])
    end_of(executor, handle)
    assert (tmp_path / "starts").read_text() == "started\n"


_KILLED_LAUNCHER = """
import os, signal, subprocess, sys
from pathlib import Path
from executors.local import executor as local
from executors.base import ExecutorConfig, ReplicaSpec
spawn = subprocess.Popen
def spawn_and_die(*args, **kwargs):
    if sys.argv[4] == "after":
        spawn(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
local.subprocess.Popen = spawn_and_die
local.LocalProcessExecutor(ExecutorConfig(state_dir=Path(sys.argv[1]))).launch_replicas(
    1, "replica_stub", {"args": ["count", sys.argv[2]]},
    specs=[ReplicaSpec(launch_key="orphan", replica=0)], env={"PYTHONPATH": sys.argv[3]})
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_launcher_killed_around_the_start_leaves_one_job(
    executor: LocalProcessExecutor, tmp_path: Path, when: str
) -> None:
    killed = subprocess.run(
        [
            sys.executable,
            "-c",
            _KILLED_LAUNCHER,
            executor.root.parent,
            tmp_path / "starts",
            HERE,
            when,
        ],
        cwd=REPOSITORY,
    )
    assert killed.returncode == -signal.SIGKILL
    if when == "before":
        assert executor.find("orphan") is None
    handle = launch(executor, "count", tmp_path / "starts", key="orphan")
    wait_for_text(tmp_path / "starts")
    assert executor.find("orphan") == handle
    executor.cancel([handle])
    end_of(executor, handle)
    assert (tmp_path / "starts").read_text() == "started\n"


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is specific to Linux"
)
def test_the_replica_of_a_killed_shim_is_killed(
    executor: LocalProcessExecutor, tmp_path: Path
) -> None:
    handle = launch(executor, "deaf", tmp_path / "up")
    pid = number_in(tmp_path / "up")
    os.kill(shim_of(executor, handle), signal.SIGKILL)
    status = end_of(executor, handle)
    assert status.cause is Cause.LOST
    assert "supervising process was killed" in status.message
    wait_for(lambda: is_gone(pid), "the replica to end")


def test_a_reused_process_id_is_never_signalled(
    executor: LocalProcessExecutor, tmp_path: Path
) -> None:
    """The job has ended, and another process now has the id of its shim."""
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    os.kill(shim_of(executor, handle), signal.SIGKILL)
    end_of(executor, handle)
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    path = executor.root / handle.launch_key / "handle.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": stranger.pid}))
    executor.cancel([handle])
    assert executor.poll([handle])[0].cause is Cause.LOST
    stranger.communicate(b"\n", timeout=LIMIT_S)
    assert stranger.returncode == 0


@pytest.mark.parametrize("wrong", ["started_since_boot_s", "boot_id"])
def test_a_reused_process_id_is_not_signalled(
    executor: LocalProcessExecutor, tmp_path: Path, wrong: str
) -> None:
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    shim_of(executor, handle)
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    path = executor.root / handle.launch_key / "handle.json"
    written = json.loads(path.read_text())
    started_s = shim.started_since_boot_s(stranger.pid)
    of_stranger = {"pid": stranger.pid, "started_since_boot_s": started_s}
    path.write_text(json.dumps({**written, **of_stranger, wrong: 0}))
    executor.cancel([handle])
    stranger.communicate(b"\n", timeout=LIMIT_S)
    assert stranger.returncode == 0
    path.write_text(json.dumps(written))
    executor.cancel([handle])
    assert end_of(executor, handle).cause is Cause.CANCELLED


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the boot time of Linux moves")
@pytest.mark.parametrize("shift_s", [-3600, 3600])
def test_a_replica_is_cancelled_after_the_clock_was_set(
    executor: LocalProcessExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift_s: int
) -> None:
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    boot_time = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_time + shift_s)
    executor.cancel([handle])
    assert end_of(executor, handle).cause is Cause.CANCELLED


def test_the_replica_does_not_hold_the_lock(executor: LocalProcessExecutor, tmp_path: Path) -> None:
    handle = launch(executor, "wait", tmp_path / "up")
    opened = psutil.Process(number_in(tmp_path / "up")).open_files()
    assert str(executor.root / handle.launch_key / "lock") not in {file.path for file in opened}


def test_an_unknown_job_is_lost(executor: LocalProcessExecutor) -> None:
    assert executor.find("unknown") is None
    handle = ReplicaHandle(backend="local", launch_key="unknown")
    executor.cancel([handle])
    (status,) = executor.poll([handle])
    assert (status.state, status.cause) == (JobState.ENDED, Cause.LOST)
    assert "unknown" in status.message
    assert list(executor.logs(handle)) == []
    assert list(executor.logs(handle, follow=True)) == []
    assert not (executor.root / "unknown").exists()


def test_an_invalid_state_dir_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("in the way")
    with pytest.raises(LaunchRefused, match=r"cannot start run-0-1 in .*jobs"):
        launch(LocalProcessExecutor(config(tmp_path)), "exit", 0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a subreaper")
def test_a_forced_stop_ends_replicas_that_ignore_sigterm_and_their_sessions(tmp_path: Path) -> None:
    """Like torchrun: each rank runs in its own session."""
    assert GRACE_S <= 5  # the default: ended within 10 s of the request
    executor = LocalProcessExecutor(config(tmp_path / "state", grace_s=0.2))
    paths = [tmp_path / name for name in ("main", "rank0", "rank1")]
    handle = launch(executor, "deaf-sessions", *paths)
    pids = [number_in(path) for path in paths]
    executor.cancel([handle])
    assert end_of(executor, handle).cause is Cause.CANCELLED
    for pid in pids:
        wait_for(lambda pid=pid: is_gone(pid), "every process of the replica to end")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a subreaper")
def test_a_session_that_a_replica_leaves_behind_ends_with_it(
    executor: LocalProcessExecutor, tmp_path: Path
) -> None:
    handle = launch(executor, "leave-session", tmp_path / "up")
    assert end_of(executor, handle).cause is Cause.DONE
    wait_for(lambda: is_gone(number_in(tmp_path / "up")), "the process left behind to end")


def test_replicas_of_another_server_are_not_listed(tmp_path: Path) -> None:
    ours = LocalProcessExecutor(config(tmp_path / "ours", grace_s=0.2))
    handle = launch(ours, "wait", tmp_path / "up")
    pid = number_in(tmp_path / "up")
    for other in (
        LocalProcessExecutor(config(tmp_path / "theirs")),
        LocalProcessExecutor(config(tmp_path / "ours", deployment="another")),
    ):
        assert other.live() == []
    LocalProcessExecutor(config(tmp_path / "theirs")).cancel([handle])
    assert not is_gone(pid) and ours.live() == [handle]
    ours.cancel([handle])
    end_of(ours, handle)


def test_the_end_of_a_server_ends_no_replica(tmp_path: Path) -> None:
    """A server's guarded processes end with it; the replicas that they started do not."""
    script = (
        "import sys; from pathlib import Path; from executors.base import ExecutorConfig\n"
        "from executors.local.executor import LocalProcessExecutor\n"
        "from tests.executors.harnesses import config, launch\n"
        "state, up = map(Path, sys.argv[1:])\n"
        "launch(LocalProcessExecutor(config(state, grace_s=0.2)), 'wait', up)\n"
        "import time; time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "state"), str(tmp_path / "up")]
    server = (
        "import subprocess, sys, time; from executors.process_guard import tethered\n"
        "worker = subprocess.Popen(tethered(sys.argv[1:])); print(worker.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", server, *command], cwd=root, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    worker, replica = int(process.stdout.readline()), number_in(tmp_path / "up")
    process.kill()
    process.wait()
    process.stdout.close()
    if sys.platform.startswith("linux"):
        wait_for(lambda: is_gone(worker), "the guarded worker to end")
    executor = LocalProcessExecutor(config(tmp_path / "state", grace_s=0.2))
    (handle,) = executor.live()
    assert not is_gone(replica)
    executor.cancel([handle])
    end_of(executor, handle)
