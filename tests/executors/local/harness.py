"""The local backend: processes of this machine, without a server."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from executors.base import ReplicaHandle
from executors.local import survivors
from executors.local.executor import LocalProcessExecutor
from tests.executors.harnesses import LIMIT_S, config, is_gone, wait_for

NO_SERVER = "processes of this machine: no server"


class LocalHarness:
    backend = "local"
    missing: Mapping[str, str] = {
        **dict.fromkeys(("server", "impatient", "requests", "one_poll", "interrupt"), NO_SERVER),
        "quota": "processes of this machine need no quota",
        "preempt": "processes of this machine are not preempted",
        "oom": "the backend cannot inject it; test_limits.py has a replica above its limit",
        "credentials": "processes of this machine need no credentials",
    }

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> LocalHarness:
        return self

    def __exit__(self, *exc: object) -> None:
        for deployment in ("contract", "another"):
            executor = self.executor(deployment=deployment, grace_s=0)
            left = executor.live()
            executor.cancel(left)
            executor.collect(left, LIMIT_S)

    def executor(self, **options: Any) -> LocalProcessExecutor:
        return LocalProcessExecutor(config(self.folder, **{"grace_s": 0.5, **options}))

    def description(self, handle: ReplicaHandle) -> str:
        folder = self.folder / "jobs" / handle.launch_key
        return "\n".join(path.read_text() for path in folder.glob("*.json"))

    def incomplete(self) -> list[str]:
        """Running jobs without a record of their shim."""
        return [
            handle.launch_key
            for handle in self.executor().live()
            if not (self.folder / "jobs" / handle.launch_key / "handle.json").exists()
        ]

    def left_behind(self) -> list[str]:
        """Running processes of ended jobs."""
        live = {handle.launch_key for handle in self.executor().live()}
        result = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                job = Path(process.environ().get(survivors.MARK, "/"))
                if job.parent == (self.folder / "jobs").absolute() and job.name not in live:
                    result.append(f"{job.name}: process {process.pid}")
        return result

    def lose(self, handle: ReplicaHandle) -> None:
        folder = self.folder / "jobs" / handle.launch_key
        shim = int(json.loads((folder / "handle.json").read_text())["pid"])
        os.kill(shim, signal.SIGKILL)
        wait_for(lambda: is_gone(shim), "the shim to end")
        shutil.rmtree(folder)


HARNESS = LocalHarness
