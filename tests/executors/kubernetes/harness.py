"""The emulated Kubernetes cluster, through the official client and a stored kubeconfig."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executors.base import ReplicaHandle
from executors.kubernetes.executor import KubernetesExecutor
from tests.emulators.interruptions import Interruption
from tests.emulators.kubernetes import KubernetesCluster
from tests.executors.harnesses import LIMIT_S, config


class KubernetesHarness:
    backend = "kubernetes"
    missing: Mapping[str, str] = {}

    def __init__(self, folder: Path) -> None:
        self.cluster = KubernetesCluster(folder)

    @property
    def wrong_credentials(self) -> Mapping[str, str]:
        return {"KUBECONFIG": json.dumps(self.cluster.kubeconfig(token="unknown-4f1c"))}

    def __enter__(self) -> KubernetesHarness:
        self.cluster.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.cluster.__exit__(*exc)

    def executor(self, **options: Any) -> KubernetesExecutor:
        kubeconfig = {"KUBECONFIG": json.dumps(self.cluster.kubeconfig())}
        ours = {"credentials": kubeconfig, "image": "replica:1", "grace_s": 1, "poll_s": 0.05}
        ours["answer_s"] = LIMIT_S
        return KubernetesExecutor(config(**{**ours, **options}))

    def impatient(self) -> KubernetesExecutor:
        return self.executor(answer_s=0.3)

    def description(self, handle: ReplicaHandle) -> str:
        job = self.cluster.job(handle.launch_key)
        return json.dumps([job, self.cluster.pods(handle.launch_key)])

    def preempt(self, handle: ReplicaHandle) -> None:
        self.cluster.preempt(handle.launch_key)

    def oom(self, handle: ReplicaHandle) -> None:
        self.cluster.oom(handle.launch_key)

    def lose(self, handle: ReplicaHandle) -> None:
        self.cluster.lose(handle.launch_key)

    def stop(self) -> None:
        self.cluster.stop()

    def start(self) -> None:
        self.cluster.start()

    def slow(self, seconds: float) -> None:
        self.cluster.slow(seconds)

    def refuse_quota(self, message: str | None) -> None:
        self.cluster.refuse_quota(message)

    def requests(self) -> int:
        return self.cluster.requests

    def interrupt(self, at: int, how: Interruption) -> None:
        self.cluster.interruptions.interrupt(at, how)

    def restore(self) -> int:
        return self.cluster.interruptions.restore()

    def incomplete(self) -> list[str]:
        return self.cluster.lacking_secrets() + self.cluster.suspended()

    def left_behind(self) -> list[str]:
        return self.cluster.unowned_secrets()


HARNESS = KubernetesHarness
