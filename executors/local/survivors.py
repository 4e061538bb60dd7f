"""Processes of a local job whose shim was killed with SIGKILL: find them, and end them.

A shim that is killed takes the replica with it (:mod:`executors.local.shim`), but not what the
replica has started: ranks in sessions of their own become children of the machine's first process
and would use its memory and GPU without end. Every process of a job inherits :data:`MARK`, which
names the job's folder, so they are found by it. Whoever sees that a job has lost its shim calls
:func:`end_survivors`. A process that has cleared its environment is found only while a marked
process is its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import psutil

from executors.local import shim
from executors.local.job import SAME_START_S, held, started_after_s

MARK = "ARCHIPELAGO_LOCAL_JOB"
"""Environment variable of every process of a job: the absolute path of the job's folder."""

WAIT_S = 0.01


def mark(folder: Path) -> dict[str, str]:
    return {MARK: str(folder.absolute())}


def end_survivors(folder: Path) -> int:
    """SIGKILL to every process that is left of a job without a shim, until none is left; how many
    were found. Does nothing while the shim lives, or where it has seen the job end."""
    found = 0
    for _ in range(shim.KILL_ROUNDS):
        left = _survivors(folder)
        if not left:
            break
        found += len(left)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(WAIT_S)
    return found


def _survivors(folder: Path) -> list[psutil.Process]:
    try:
        handle = json.loads((folder / "handle.json").read_text())
    except (OSError, ValueError):
        return []
    if (folder / "exit.json").exists() or handle["boot_id"] != shim.boot_id():
        return []
    if held(folder / "lock"):
        return []
    wanted = str(folder.absolute())
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if started_after_s(process.pid, handle) < -SAME_START_S:
                continue
            if process.environ().get(MARK) == wanted:
                children = process.children(recursive=True)
                found |= {one.pid: one for one in (process, *children)}
    return list(found.values())
