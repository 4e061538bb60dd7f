"""Find and kill the processes of a local job whose shim was killed with SIGKILL.

When a shim dies, the kernel kills the replica (:mod:`executors.local.shim`) but not the replica's
children: ranks in their own sessions are adopted by process 1 and would keep their memory and GPU.
Every process of a job inherits :data:`MARK`, which names the job's folder. A process that cleared
its environment is found only while its parent is a marked process.
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
    """Kill all remaining processes of a job without a shim. Returns the number of processes found.

    Does nothing while the shim is alive, or after it recorded the job's end.
    """
    count = 0
    for _ in range(shim.KILL_ROUNDS):
        left = _survivors(folder)
        if not left:
            break
        count += len(left)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(WAIT_S)
    return count


def _survivors(folder: Path) -> list[psutil.Process]:
    try:
        handle = json.loads((folder / "handle.json").read_text())
    except (OSError, ValueError):
        return []
    if (folder / "exit.json").exists() or handle["boot_id"] != shim.boot_id():
        return []
    if held(folder / "lock"):
        return []
    job_mark = str(folder.absolute())
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if started_after_s(process.pid, handle) < -SAME_START_S:
                continue
            if process.environ().get(MARK) == job_mark:
                children = process.children(recursive=True)
                found |= {one.pid: one for one in (process, *children)}
    return list(found.values())
