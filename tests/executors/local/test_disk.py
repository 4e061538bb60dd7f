"""Local jobs on a full disk: a launch waits for room, and an end is recorded."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executors.base import Cause, JobState, NoCapacity, PendingCause
from executors.launching import DEPLOYMENT_LABEL
from executors.local import shim
from executors.local.executor import LocalProcessExecutor
from tests.executors.harnesses import LIMIT_S, config, end_of, launch, wait_for

pytestmark = pytest.mark.processes


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[LocalProcessExecutor]:
    made = LocalProcessExecutor(config(tmp_path, grace_s=0.2))
    yield made
    left = made.live()
    made.cancel(left)
    made.collect(left, LIMIT_S)


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT])
def test_a_launch_waits_for_a_full_disk(
    executor: LocalProcessExecutor, monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    write = Path.write_text

    def refuse(path: Path, *args: Any, **options: Any) -> int:
        if path.name.startswith(".job.json"):
            path.touch()
            raise OSError(full, os.strerror(full))
        return write(path, *args, **options)

    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_text", refuse)
        with pytest.raises(NoCapacity, match=r"^disk (full|quota in use): cannot") as refused:
            launch(executor, "exit", 0)
    assert refused.value.pending is PendingCause.CAPACITY and refused.value.attempts is None
    assert executor.find("run-0-1") is None
    assert not list(executor.root.glob("*/.job.json*")), "no part of a record is left"
    assert end_of(executor, launch(executor, "exit", 0)).cause is Cause.DONE


def test_a_record_is_written_to_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def refuse(path: Path, *args: Any, **options: Any) -> int:
        if (path.parent / "reserve").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *args, **options)

    shim.reserve_space(tmp_path)
    monkeypatch.setattr(Path, "write_text", refuse)
    shim.write_record(tmp_path / "exit.json", {"exit_code": 3})
    assert json.loads((tmp_path / "exit.json").read_text()) == {"exit_code": 3}


def test_a_job_keeps_no_reserve_after_its_end(executor: LocalProcessExecutor) -> None:
    handle = launch(executor, "exit", 0)
    end_of(executor, handle)
    folder = executor.root / handle.launch_key
    wait_for(lambda: not (folder / "reserve").exists(), "the reserve to be given back")


def test_damaged_files_of_one_job_do_not_hide_the_others(tmp_path: Path) -> None:
    executor = LocalProcessExecutor(config(tmp_path))
    with contextlib.ExitStack() as locks:
        for name, record in (("bad", b'{"labels": '), ("good", None)):
            folder = executor.root / f"0123456789ab-{name}-1"
            folder.mkdir(parents=True)
            labels = {DEPLOYMENT_LABEL: executor.config.deployment}
            (folder / "job.json").write_bytes(record or json.dumps({"labels": labels}).encode())
            (folder / "handle.json").write_bytes(b"{")
            lock = locks.enter_context((folder / "lock").open("ab"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        [handle] = executor.live()
        assert handle.launch_key == "0123456789ab-good-1"
        [status] = executor.poll([handle])
    assert status.state is JobState.UNKNOWN
    assert "damaged files" in status.message
