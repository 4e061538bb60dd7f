"""Local replicas under a separate account, which requires a server that runs as root."""

from __future__ import annotations

import json
import os
import pwd
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from executors.base import Cause, ExecutorConfig, JobState
from executors.local import job, user
from executors.local.executor import LocalProcessExecutor
from tests.executors.harnesses import LIMIT_S, wait_for

NAME = "nobody"
PYTHON = "/usr/bin/python3"
"""An interpreter that the account can start: that of the tests can be in a home folder."""

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not Path(PYTHON).exists(),
    reason="only root can start processes of another user, with a Python that it can read",
)


@pytest.mark.parametrize("name", ["root", "no-such-account-here", ""])
def test_accounts_that_cannot_be_used(name: str) -> None:
    assert user.user_problem(name).startswith("expected")


def test_without_the_setting_replicas_run_as_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(user.SETTING, raising=False)
    assert user.account() is None


def test_a_python_in_a_private_folder_is_reported(tmp_path: Path) -> None:
    program = tmp_path / "private" / "python"
    program.parent.mkdir(mode=0o700)
    program.touch(mode=0o755)
    assert "cannot be started by another account" in user.unreachable(program)


@pytest.fixture
def state() -> Iterator[Path]:
    """A folder whose parents every account can traverse, unlike pytest's temporary folders."""
    with tempfile.TemporaryDirectory(prefix="archipelago-test-") as folder:
        before = os.umask(user.SHARED_UMASK)
        yield Path(folder)
        os.umask(before)


@needs_root
@pytest.mark.processes
def test_a_replica_cannot_read_the_server_s_secrets_nor_forge_its_own_end(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(user.SETTING, NAME)
    secret = state / "credentials_key"
    secret.write_text("the key")
    result = pwd.getpwnam(NAME)
    user.share_state(state, result, [state / "rendezvous"])
    inside = state / "rendezvous" / "run"
    inside.mkdir()
    (inside / "group.json").write_text("{}")
    probe = f"""
import json, os
def attempt(action):
    try:
        action()
        return "done"
    except OSError as error:
        return type(error).__name__
print(json.dumps({{
    "uid": os.getuid(), "groups": os.getgroups(), "gid": os.getgid(),
    "secret": attempt(lambda: open({str(secret)!r}).read()),
    "list": attempt(lambda: os.listdir({str(state)!r})),
    "forge": attempt(lambda: open("../exit.json", "w")),
    "handle": attempt(lambda: open("../handle.json", "w")),
    "group": attempt(lambda: open({str(inside / "group.json")!r}).read()),
    "write": attempt(lambda: open({str(inside / "heartbeat")!r}, "w").write("alive")),
    "work": attempt(lambda: open("file", "w").write("x")),
    "home": os.environ["HOME"] == os.getcwd(),
    "again": attempt(lambda: os.setuid(0)),
}}))
"""
    config = ExecutorConfig(deployment="test", state_dir=state)
    executor = LocalProcessExecutor(config)
    monkeypatch.setattr(
        "executors.local.executor.bootstrap.command", lambda *_, **__: [PYTHON, "-I", "-c", probe]
    )
    [handle] = executor.launch_replicas(1, "x")
    [status] = executor.collect([handle], LIMIT_S)
    text = "".join(line.text for line in executor.logs(handle))
    assert (status.state, status.cause) == (JobState.ENDED, Cause.DONE), text
    seen = json.loads(text)
    assert seen == {
        "uid": result.pw_uid,
        "groups": [],
        "gid": result.pw_gid,
        "secret": "PermissionError",
        "list": "PermissionError",
        "forge": "PermissionError",
        "handle": "PermissionError",
        "group": "done",
        "write": "done",
        "work": "done",
        "home": True,
        "again": "PermissionError",
    }
    assert (inside / "heartbeat").read_text() == "alive"


@needs_root
@pytest.mark.processes
def test_a_replica_of_another_account_can_be_cancelled(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(user.SETTING, NAME)
    executor = LocalProcessExecutor(ExecutorConfig(deployment="test", state_dir=state))
    sleep = "import time; print('up', flush=True); time.sleep(600)"
    monkeypatch.setattr(
        "executors.local.executor.bootstrap.command", lambda *_, **__: [PYTHON, "-I", "-c", sleep]
    )
    [handle] = executor.launch_replicas(1, "x")
    log = executor.root / handle.launch_key / "log"
    wait_for(lambda: "up" in job.tail(log), "the replica")
    executor.cancel([handle])
    [status] = executor.collect([handle], LIMIT_S)
    assert status.cause is Cause.CANCELLED
