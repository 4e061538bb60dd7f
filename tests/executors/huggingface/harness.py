"""Hugging Face Jobs: the real ``HfApi`` against the emulated Hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from huggingface_hub import HfApi, JobInfo

from executors.base import ReplicaHandle
from executors.huggingface.executor import HFJobsExecutor
from tests.emulators.huggingface import TOKEN, USER, HuggingFaceHub
from tests.emulators.interruptions import Interruption
from tests.executors.harnesses import LIMIT_S, config

GRACE_S = 1.0


class HuggingFaceHarness:
    backend = "huggingface"
    missing: Mapping[str, str] = {}
    wrong_credentials: ClassVar[dict[str, str]] = {"HF_TOKEN": "hf_nobodysZmGqTx"}

    def __init__(self, folder: Path) -> None:
        self.hub = HuggingFaceHub(folder, grace_s=GRACE_S)

    def __enter__(self) -> Self:
        self.hub.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.hub.__exit__(kind, error, traceback)

    def executor(self, **options: Any) -> HFJobsExecutor:
        given = {
            "endpoint": self.hub.url,
            "poll_s": 0.05,
            "request_timeout_s": LIMIT_S,
            **options,
        }
        given.setdefault("credentials", {"HF_TOKEN": TOKEN})
        return HFJobsExecutor(config(**given))

    def impatient(self) -> HFJobsExecutor:
        return self.executor(request_timeout_s=0.3)

    def description(self, handle: ReplicaHandle) -> str:
        user = self.hub.user(f"Bearer {TOKEN}")
        job, namespace = handle.data["job_id"], handle.data["namespace"]
        return json.dumps(self.hub.inspect(user, namespace, job))

    def preempt(self, handle: ReplicaHandle) -> None:
        self.hub.preempt(handle.data["job_id"])

    def oom(self, handle: ReplicaHandle) -> None:
        self.hub.oom(handle.data["job_id"])

    def lose(self, handle: ReplicaHandle) -> None:
        self.hub.lose(handle.data["job_id"])

    def stop(self) -> None:
        self.hub.stop()

    def start(self) -> None:
        self.hub.start()

    def slow(self, seconds: float) -> None:
        self.hub.slow(seconds)

    def refuse_quota(self, message: str | None) -> None:
        self.hub.refuse_quota(message)

    def interrupt(self, at: int, how: Interruption) -> None:
        self.hub.faults.interruptions.interrupt(at, how)

    def restore(self) -> int:
        return self.hub.faults.interruptions.restore()

    def incomplete(self) -> list[str]:
        """Always empty: a job's secrets are in the request that creates it."""
        return []

    def left_behind(self) -> list[str]:
        return []

    def requests(self) -> int:
        return self.hub.requests


def jobs_of(hub: HuggingFaceHub, namespace: str = USER) -> list[JobInfo]:
    api = HfApi(token=TOKEN, endpoint=hub.url)
    return list(api.list_jobs(namespace=namespace))


def job_id(handle: ReplicaHandle | None) -> str:
    assert handle is not None
    return str(handle.data["job_id"])


HARNESS = HuggingFaceHarness
