"""The state of a local job, read from its folder; and a request to end it.

:mod:`executors.local.executor` describes the lock and the files. This module keeps no state.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from executors.base import Cause, JobState, PendingCause, ReplicaStatus, RetryLater
from executors.launching import DEPLOYMENT_LABEL, exit_cause
from executors.local import shim

START_S = 30.0
"""Startup timeout of a shim; after it the launch is retried."""

TRY_S = 0.01
TAIL_LINES = 8
TAIL_BYTES = 4_000

_NO_MEMORY = re.compile(r"^([\w.]+\.)?(MemoryError|OutOfMemoryError)\b", re.MULTILINE)
"""The last line of a traceback of Python or torch without memory; torch also for a GPU's memory."""

SAME_START_S = 2.0
"""Start times that differ by less belong to the same process: clock adjustments change the wall
time of a start slightly."""


def take(lock_fd: int, folder: Path) -> bool:
    """Take the lock of a new job. Returns False if the job was started before.

    Another process can hold the lock for a moment: a check by :func:`held`, or a shim that has not
    written its handle yet. Both are waited for.
    """
    deadline = time.monotonic() + START_S
    while True:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            taken = False
        else:
            taken = True
        if (folder / "handle.json").exists():
            return False
        if taken:
            return True
        if time.monotonic() > deadline:
            raise RetryLater(f"{folder.name}: its supervising process did not come up")
        time.sleep(TRY_S)


def held(path: Path) -> bool:
    """Whether any process holds the lock. The check itself takes a shared lock for a moment."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def request_end(folder: Path) -> None:
    """Send SIGTERM to the shim if it is alive and its identity is verified."""
    handle = _read(folder / "handle.json")
    if handle is None or handle["boot_id"] != shim.boot_id():
        return
    pid = int(handle["pid"])
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        # A pidfd refers to the process itself; its pid could be reused after the check.
        pidfd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        try:
            is_same = abs(started_after_s(pid, handle)) < SAME_START_S
            if not is_same or not held(folder / "lock"):
                return
            if pidfd is not None:
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            else:
                os.kill(pid, signal.SIGTERM)
        finally:
            if pidfd is not None:
                os.close(pidfd)


def started_after_s(pid: int, handle: Mapping[str, Any]) -> float:
    """Seconds between the start of the shim of ``handle`` and the start of ``pid``.

    Raises :class:`ProcessLookupError` or :class:`psutil.NoSuchProcess` for an unknown process.
    """
    started_s = handle.get("started_since_boot_s")  # not in handles of older versions
    found_s = shim.started_since_boot_s(pid)
    if started_s is not None and found_s is not None:
        return float(found_s - started_s)
    return float(psutil.Process(pid).create_time() - handle["created_s"])


def deployment_of(folder: Path) -> str | None:
    """The deployment of a job; None if its file is missing or damaged."""
    try:
        job = _read(folder / "job.json")
        return None if job is None else str(job["labels"][DEPLOYMENT_LABEL])
    except (ValueError, LookupError, TypeError):
        return None


def status(folder: Path) -> ReplicaStatus:
    """The status of the job of ``folder``, from its files and its lock."""
    try:
        # The order matters: a job with a handle was alive, and a shim writes exit.json before it
        # releases the lock.
        handle = _read(folder / "handle.json")
        alive = held(folder / "lock")
        end = _read(folder / "exit.json")
    except OSError as error:
        return ReplicaStatus(state=JobState.UNKNOWN, message=f"{folder}: {error.strerror}")
    except ValueError as error:
        return ReplicaStatus(state=JobState.UNKNOWN, message=f"{folder}: damaged files: {error}")
    started_wall_s = handle["started_wall_s"] if handle else None
    if end is not None:
        return _ended(end, folder, started_wall_s)
    if alive:
        return ReplicaStatus(
            state=JobState.RUNNING if handle else JobState.PENDING,
            pending=None if handle else PendingCause.STARTING,
            started_wall_s=started_wall_s,
            deadline_wall_s=handle["deadline_wall_s"] if handle else None,
        )
    if handle is None and (folder / "job.json").exists():
        message = "the replica's supervising process ended before it could start the replica"
    elif handle is None:
        message = f"no job {folder.name} was ever started in {folder.parent}"
    else:
        message = "the replica's supervising process was killed, or the machine restarted"
    return ReplicaStatus(
        state=JobState.ENDED,
        cause=Cause.LOST,
        message=message,
        started_wall_s=started_wall_s,
    )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return record


_ENDED_BY: dict[str, Cause] = {
    shim.EndedBy.CANCELLED: Cause.CANCELLED,
    shim.EndedBy.DEADLINE: Cause.DEADLINE,
    shim.EndedBy.MEMORY: Cause.OUT_OF_MEMORY,
}


def _ended(end: Mapping[str, Any], folder: Path, started_wall_s: float | None) -> ReplicaStatus:
    exit_code: int | None = end["exit_code"]
    message = str(end["message"])
    cause = _ENDED_BY.get(end["ended_by"])
    if cause is Cause.CANCELLED:
        message = message or "cancelled"
    elif cause is None:
        last_lines = tail(folder / "log")
        # The shim reports out-of-memory kills by the kernel; Python and torch log their own errors.
        no_memory = bool(_NO_MEMORY.search(last_lines)) and exit_code != 0
        cause, why = exit_cause(exit_code, out_of_memory=no_memory)
        if cause is not Cause.DONE:
            message = (message or _signal_text(exit_code) or why) + _last_lines(last_lines)
    else:
        message += _last_lines(tail(folder / "log"))
    return ReplicaStatus(
        state=JobState.ENDED,
        cause=cause,
        exit_code=exit_code,
        message=message,
        started_wall_s=started_wall_s,
        ended_wall_s=end["ended_wall_s"],
    )


def _last_lines(text: str) -> str:
    return f". Last lines of its log:\n{text}" if text else ""


def _signal_text(exit_code: int | None) -> str:
    """Description of an end by a signal (a negative code); empty for other ends."""
    if exit_code is None or exit_code >= 0:
        return ""
    name = signal.Signals(-exit_code).name
    if exit_code == -signal.SIGKILL:
        return f"killed with {name} (not an out-of-memory kill)"
    return f"killed by {name}"


def tail(path: Path) -> str:
    """The last lines of a log file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.strip().splitlines()[-TAIL_LINES:])
