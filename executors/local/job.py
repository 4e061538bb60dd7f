"""One local job seen through its folder: is it alive, how did it end, ask it to end.

The lock and the files are described in :mod:`executors.local.executor`. Nothing here remembers
anything.
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
"""How long a shim may take to be up; then the launch is to be tried again."""

TRY_S = 0.01
TAIL_LINES = 8
TAIL_BYTES = 4_000

_NO_MEMORY = re.compile(r"^([\w.]+\.)?(MemoryError|OutOfMemoryError)\b", re.MULTILINE)
"""How Python and torch say it at the end of a traceback, torch also of a GPU's memory."""

SAME_START_S = 2.0
"""Two start times that differ by less are of one process: where only the time of day of a start is
known, it moves a little as clocks are set."""


def take(lock_fd: int, folder: Path) -> bool:
    """Take the lock of a job to be started; False if it was started before.

    The lock can be taken by an asker (see :func:`held`) for an instant, or by a shim that has not
    written its handle yet; both are over soon.
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
    """Whether somebody holds the lock. Asking takes it, shared, for an instant."""
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


def ask_to_end(folder: Path) -> None:
    """SIGTERM to the shim, if it is alive and really the shim."""
    handle = _read(folder / "handle.json")
    if handle is None or handle["boot_id"] != shim.boot_id():
        return
    pid = int(handle["pid"])
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        # A descriptor names the process itself: its number may be given away after the check.
        pidfd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        try:
            same = abs(started_after_s(pid, handle)) < SAME_START_S
            if not same or not held(folder / "lock"):
                return
            if pidfd is not None:
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            else:
                os.kill(pid, signal.SIGTERM)
        finally:
            if pidfd is not None:
                os.close(pidfd)


def started_after_s(pid: int, handle: Mapping[str, Any]) -> float:
    """How long after the shim of ``handle`` a process started; 0 for the shim itself.

    Raises :class:`ProcessLookupError` or :class:`psutil.NoSuchProcess` where there is none.
    """
    started_s = handle.get("started_since_boot_s")  # not in handles of older versions
    found_s = shim.started_since_boot_s(pid)
    if started_s is not None and found_s is not None:
        return float(found_s - started_s)
    return float(psutil.Process(pid).create_time() - handle["created_s"])


def deployment_of(folder: Path) -> str | None:
    """Whose job it is."""
    job = _read(folder / "job.json")
    return None if job is None else str(job["labels"][DEPLOYMENT_LABEL])


def status(folder: Path) -> ReplicaStatus:
    """How the job of ``folder`` is, by its files and its lock."""
    try:
        # In this order: a job whose handle is there has been alive, and one that has let go of its
        # lock since has left its exit.json before.
        handle = _read(folder / "handle.json")
        alive = held(folder / "lock")
        end = _read(folder / "exit.json")
    except OSError as error:
        return ReplicaStatus(state=JobState.UNKNOWN, message=f"{folder}: {error.strerror}")
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
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return found


_ENDED_BY = {
    "cancelled": Cause.CANCELLED,
    "deadline": Cause.DEADLINE,
    "memory": Cause.OUT_OF_MEMORY,
}


def _ended(end: Mapping[str, Any], folder: Path, started_wall_s: float | None) -> ReplicaStatus:
    exit_code: int | None = end["exit_code"]
    message = str(end["message"])
    cause = _ENDED_BY.get(end["ended_by"])
    if cause is Cause.CANCELLED:
        message = message or "cancelled"
    elif cause is None:
        said = tail(folder / "log")
        # The shim reports a kill by the kernel for lack of memory; Python and torch report their
        # own; a program that was killed otherwise was not.
        no_memory = bool(_NO_MEMORY.search(said)) and exit_code != 0
        cause, why = exit_cause(exit_code, out_of_memory=no_memory)
        message = message or ("" if cause is Cause.DONE else _how(exit_code) or why)
        message += f". Last lines of its log:\n{said}" if said and cause is not Cause.DONE else ""
    else:
        said = tail(folder / "log")
        message += f". Last lines of its log:\n{said}" if said else ""
    return ReplicaStatus(
        state=JobState.ENDED,
        cause=cause,
        exit_code=exit_code,
        message=message,
        started_wall_s=started_wall_s,
        ended_wall_s=end["ended_wall_s"],
    )


def _how(exit_code: int | None) -> str:
    """How a process ended by a signal, whose number is negative here; '' for other ends."""
    if exit_code is None or exit_code >= 0:
        return ""
    name = signal.Signals(-exit_code).name
    if exit_code == -signal.SIGKILL:
        return f"killed with {name} (not an out-of-memory kill)"
    return f"killed by {name}"


def tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.strip().splitlines()[-TAIL_LINES:])
