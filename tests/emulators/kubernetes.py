"""A Kubernetes cluster on one machine that runs Jobs, with pods as processes.

:mod:`tests.emulators.kubernetes_http` serves the API for ``executors/kubernetes/executor.py`` and,
with ``tls``, for ``kubectl`` (get, describe, logs, delete; without TLS ``kubectl`` sends no token).
:mod:`tests.emulators.kubernetes_jobs` and :mod:`tests.emulators.kubernetes_kubelet` implement Jobs
and pods.

The state survives :meth:`KubernetesCluster.stop`, but not the process.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from tests.emulators.http_server import HttpServer
from tests.emulators.interruptions import Interruption, Interruptions
from tests.emulators.kubernetes_http import KEEP_ALIVE_S, ApiServer
from tests.emulators.kubernetes_jobs import Controllers, has_ended
from tests.emulators.kubernetes_kubelet import Kubelet
from tests.emulators.kubernetes_kueue import queue_of
from tests.emulators.kubernetes_objects import KINDS, Json, Objects, Refused
from tests.emulators.processes import Processes

TOKEN = "emulated-token"
USER = "system:serviceaccount:default:archipelago"
NAMESPACES = ("default", "training")
TICK_S = 0.02

REGION_LABEL = "topology.kubernetes.io/region"
GPU = "nvidia.com/gpu"
GPU_NODE = {
    "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    "cloud.google.com/gke-spot": "true",
    REGION_LABEL: "emulated-1",
}

Right = tuple[str, str, str]
"""API group, resource and verb."""


class KubernetesCluster:
    """One cluster on a loopback port; 0 selects a free one. A context manager.

    ``tokens`` maps tokens to users. A user has all permissions unless :attr:`rights` lists them.
    The cluster starts with a node of eight GPUs and a node without GPUs.
    """

    def __init__(
        self,
        root: Path,
        *,
        port: int = 0,
        tokens: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.port = port
        self.tls = tls
        self.tokens = dict(tokens or {TOKEN: USER})
        self.rights: dict[str, set[Right]] = {}
        self.requested_rights: set[Right] = set()
        """Permissions that requests needed so far, granted or not."""
        self.requests = 0
        self.delay_s = 0.0
        self.interruptions = Interruptions()
        self.lock = threading.Lock()
        self.objects = Objects(NAMESPACES)
        self.kubelet = Kubelet(self.objects, root)
        self.controllers = Controllers(self.objects, self.kubelet)
        self._quota: str | None = None
        self._failures: list[Refused] = []
        self._server: HttpServer | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="controllers", daemon=True)
        self.add_node("cpu-1")
        self.add_node("gpu-1", gpus=8, labels=GPU_NODE, taints=[GPU])

    @property
    def url(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.port}"

    @property
    def processes(self) -> Processes:
        """The processes of the pods, by uid."""
        return self.kubelet.processes

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self._over.set()
        self._thread.join()
        self.processes.close()

    def kubeconfig(self, *, token: str = TOKEN, namespace: str = "default") -> Json:
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "emulated",
            "clusters": [{"name": "emulated", "cluster": {"server": self.url}}],
            "users": [{"name": "emulated", "user": {"token": token}}],
            "contexts": [
                {
                    "name": "emulated",
                    "context": {"cluster": "emulated", "user": "emulated", "namespace": namespace},
                }
            ],
        }

    # Objects

    def add_node(
        self,
        name: str,
        *,
        gpus: int = 0,
        labels: Mapping[str, str] | None = None,
        taints: Iterable[str] = (),
    ) -> None:
        allocatable = {"cpu": "64", "memory": "256Gi", "pods": "110"}
        if gpus:
            allocatable[GPU] = str(gpus)
        self.objects.create(
            "nodes",
            "",
            {
                "metadata": {
                    "name": name,
                    "labels": {REGION_LABEL: "emulated-1", **(labels or {})},
                },
                "spec": {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]},
                "status": {"allocatable": allocatable},
            },
        )

    def remove_node(self, name: str) -> None:
        self.objects.remove("nodes", "", name)

    def add_namespace(self, name: str) -> None:
        self.objects.namespaces.add(name)

    def add_queue(self, name: str, quota: int) -> None:
        """Create or change a LocalQueue of Kueue, which admits this number of Jobs at once."""
        self.controllers.kueue.add_queue(name, quota)

    def evict_from_queue(self, job: str) -> None:
        """Let Kueue preempt a Job."""
        with self.objects.changed:
            self.controllers.kueue.evict(self.job(job))

    def lacking_secrets(self) -> list[str]:
        """Names of Jobs, not ended, whose pod names a Secret that does not exist."""
        with self.objects.changed:
            return [
                job["metadata"]["name"]
                for job in self.objects.all("jobs")
                if not has_ended(job)
                and any(
                    not self._exists("secrets", job["metadata"]["namespace"], name)
                    for name in _secrets_of(job)
                )
            ]

    def suspended(self) -> list[str]:
        """Names of Jobs that are suspended and in no queue."""
        return [
            job["metadata"]["name"]
            for job in self.objects.all("jobs")
            if job["spec"].get("suspend") and not queue_of(job)
        ]

    def unowned_secrets(self) -> list[str]:
        """Names of Secrets that no living object owns: no deletion removes them."""
        with self.objects.changed:
            alive = {job["metadata"]["uid"] for job in self.objects.all("jobs")}
            return [
                secret["metadata"]["name"]
                for secret in self.objects.all("secrets")
                if not alive
                & {each["uid"] for each in secret["metadata"].get("ownerReferences") or ()}
            ]

    def _exists(self, resource: str, namespace: str, name: str) -> bool:
        try:
            self.objects.get(resource, namespace, name)
        except Refused:
            return False
        return True

    def add_quota(self, name: str, hard: Mapping[str, str], *, namespace: str = "default") -> None:
        with self.objects.changed:
            used = self.controllers.used(namespace, hard)
            status = {"hard": dict(hard), "used": {key: str(count) for key, count in used.items()}}
            quota = {"metadata": {"name": name}, "spec": {"hard": dict(hard)}, "status": status}
            self.objects.create("resourcequotas", namespace, quota)

    def job(self, name: str) -> Json:
        """A Job by its name or the launch key of its label. Raises :class:`KeyError`."""
        for job in self.objects.all("jobs"):
            labels = job["metadata"].get("labels") or {}
            if name in (job["metadata"]["name"], labels.get("archipelago-key")):
                return job
        raise KeyError(f"no Job {name}")

    def pods(self, name: str) -> list[Json]:
        with self.objects.changed:
            return self.objects.owned("pods", self.job(name))

    # Calls of the API server

    def may(self, user: str, group: str, resource: str, verb: str) -> bool:
        allowed = self.rights.get(user)
        return allowed is None or (group, resource, verb) in allowed

    def admit(self, resource: str, namespace: str, given: Json) -> None:
        """Admit a new Job or Secret. Raises :class:`Refused` if a quota is used up."""
        if resource == "jobs":
            self.controllers.kueue.mutate(given)
        elif resource != "secrets":
            return
        qualified = KINDS[resource].qualified
        with self.objects.changed:
            refusal = self.controllers.over_quota(namespace, qualified, {})
        if resource == "jobs" and self._quota:
            refusal = self._quota
        if refusal:
            name = (given.get("metadata") or {}).get("name", "")
            raise Refused(403, "Forbidden", f'{qualified} "{name}" is forbidden: {refusal}')

    def raise_injected(self) -> None:
        with self.lock:
            failure = self._failures.pop(0) if self._failures else None
        if failure is not None:
            raise failure

    # Faults

    def start(self) -> None:
        """Accept connections, at the same address after a :meth:`stop`."""
        assert self._server is None, "the server is running"
        self._server = HttpServer(
            ApiServer(self), port=self.port, tls=self.tls, idle_s=KEEP_ALIVE_S
        ).start()
        self.port = self._server.port

    def stop(self) -> None:
        """Refuse new connections and close open ones. Pods continue."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def preempt(self, job: str) -> None:
        """Preempt a Job's pod for one of higher priority."""
        with self.objects.changed:
            for pod in self.pods(job):
                self.kubelet.disrupt(
                    pod,
                    "PreemptionByScheduler",
                    "default-scheduler: preempting to accommodate a higher priority pod",
                )

    def oom(self, job: str) -> None:
        for pod in self.pods(job):
            self.processes.kill(pod["metadata"]["uid"], "oom", grace_s=0)

    def expire(self, job: str) -> None:
        """End a Job's pods as at their deadline, which is later."""
        for pod in self.pods(job):
            self.processes.kill(pod["metadata"]["uid"], "deadline")

    def lose(self, job: str) -> None:
        """Delete a Job, and its pods without a grace period."""
        with self.objects.changed:
            meta = self.job(job)["metadata"]
            for pod in self.pods(job):
                self.kubelet.forget(pod)
            self.objects.remove("jobs", meta["namespace"], meta["name"])

    def refuse_quota(self, message: str | None = "exceeded quota: jobs") -> None:
        """Refuse Jobs with this quota message; None ends it."""
        self._quota = message

    def slow(self, seconds: float) -> None:
        """Delay every response by ``seconds``."""
        self.delay_s = seconds

    def fail(
        self, code: int, message: str = "", *, times: int = 1, after_s: int | str | None = None
    ) -> None:
        """Refuse the next requests with this status. ``after_s``: the header ``Retry-After``, in
        seconds or as an HTTP date."""
        text = message or "injected failure"
        failures = [Refused(code, "", text, after_s=after_s) for _ in range(times)]
        with self.lock:
            self._failures.extend(failures)

    def interrupt(self, at: int, how: str) -> None:
        """See :meth:`tests.emulators.interruptions.Interruptions.interrupt`."""
        self.interruptions.interrupt(at, Interruption(how))

    def _run(self) -> None:
        while not self._over.is_set():
            self.controllers.step()
            self._over.wait(TICK_S)


def _secrets_of(job: Json) -> set[str]:
    """Names of the Secrets that its container reads."""
    container = job["spec"]["template"]["spec"]["containers"][0]
    references = (
        (each.get("valueFrom") or {}).get("secretKeyRef") for each in container.get("env") or ()
    )
    return {reference["name"] for reference in references if reference}
