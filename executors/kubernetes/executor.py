"""Replicas as Jobs of a Kubernetes cluster, by the official client.

::

    launch key --sha256--> Job  <name>     one pod, one completion, never tried again
                           Secret <name>   owned by the Job, goes with it
    labels archipelago-deployment, archipelago-key, archipelago-replica on all of them

The Job's name is made of the deployment and the launch key, so the API itself refuses the second
of two creations, and ``ensure`` continues with the first. A Job with secrets is created in three
steps, each of which the next ``ensure`` repeats or skips: the Job, suspended; the Secret, owned by
the Job, so that it never outlives it; a patch that marks the Job as complete and resumes it, or
hands it to its queue. No pod starts without its Secret, and an attempt that is abandoned at any
step leaves one suspended Job, which ``live`` lists and ``cancel`` ends.

``cancel`` does not delete: a deleted Job would be forgotten, and its key could start again. It
gives the Job a deadline that is over, by which the cluster ends the pod with its grace and marks
the Job as failed for good. The cluster deletes pods that it ends so, and their logs with them.

``poll`` takes two lists, of Jobs and of pods, however many are asked for (a third, of warnings,
while a Job waits and its pod does not say why). An ended Job stays ``keep_s`` seconds, then it is
lost.

Kubernetes 1.28 or newer. Left out: indexed or parallel Jobs (a replica is one pod; several GPUs of
one node are one replica's), and watching: the control plane polls anyway.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from executors import launching
from executors.base import (
    Capabilities,
    CodeRef,
    ExecutorConfig,
    JobState,
    LaunchRefused,
    LogLine,
    NeedsPerson,
    Problem,
    ReplicaHandle,
    ReplicaSpec,
    ReplicaStatus,
    RetryLater,
)
from executors.bootstrap.command import command
from executors.kubernetes import ensure as kubernetes_ensure
from executors.kubernetes import logs as kubernetes_logs
from executors.kubernetes import manifest
from executors.kubernetes import options as kubernetes_options
from executors.kubernetes import status as states
from executors.kubernetes.auth import CREDENTIAL, connection
from executors.kubernetes.client import ANSWER_S, Cluster, Gone
from executors.kubernetes.options import Json
from executors.kubernetes.preflight import problems

POLL_S = 2.0
SELECTOR_CHARS = 4_000
"""Of a label selector: it travels in the address of a request, and 8 KB is what a proxy takes."""

UNEXPLAINED_S = 10.0
"""A Job that waits so long without its pod saying why is worth asking for warnings."""


_FIELDS = {"image": "image", "hardware": "hardware", "spot": "spot", "label": "labels"}


class KubernetesExecutor(launching.LaunchReplicas):
    """Jobs in one namespace. Options and credentials: ``docs/backends/kubernetes.md``."""

    backend = "kubernetes"

    def __init__(self, config: ExecutorConfig) -> None:
        self.config = config
        kubernetes_options.check_label("deployment", config.deployment)
        kubernetes_options.read(config.options, {})
        self.capabilities = Capabilities(spot=bool(config.options.get("spot")))
        self.poll_s = float(config.options.get("poll_s", POLL_S))
        self._cluster: Cluster | None = None
        self._lock = threading.Lock()

    @property
    def cluster(self) -> Cluster:
        """Made when it is first needed. Raises :class:`NeedsPerson` without a usable credential."""
        with self._lock:
            if self._cluster is None:
                made, namespace = connection(
                    self.config.credentials.get(CREDENTIAL, ""),
                    context=str(self.config.options.get("context", "")),
                )
                options = self.config.options
                self._cluster = Cluster(
                    made,
                    str(options.get("namespace") or namespace),
                    answer_s=float(options.get("answer_s", ANSWER_S)),
                )
            return self._cluster

    def ensure(
        self,
        specs: Sequence[ReplicaSpec],
        entrypoint: str,
        entrypoint_args: Mapping[str, Any] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        code: CodeRef | None = None,
    ) -> list[ReplicaHandle]:
        """See :meth:`executors.base.ServerlessExecutor.ensure`."""
        request = launching.prepare(specs, entrypoint_args)

        def start(spec: ReplicaSpec) -> ReplicaHandle:
            plain, hidden = request.environment(spec, env=env, secrets=secrets)
            options = kubernetes_options.read(self.config.options, spec.options)
            line = command(entrypoint, request.args, python=options.python, code=code)
            job = self._job(spec, line, plain, hidden)
            kubernetes_ensure.ensure(self.cluster, job, hidden, queue=options.queue)
            return self._handle(spec.launch_key)

        return launching.launch_each(start, request.specs)

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        jobs: dict[str, Json] = {}
        pods: defaultdict[str, list[Json]] = defaultdict(list)
        for selector in self._selectors(handle.launch_key for handle in handles):
            # Jobs first: the pod of a Job that has ended is then surely in its last state.
            jobs |= {job["metadata"]["name"]: job for job in self.cluster.list_jobs(selector)}
            for pod in self.cluster.list_pods(selector):
                pods[_owner(pod)].append(pod)
        found = [(jobs.get(name), states.newest(pods[name])) for name in map(self._name, handles)]
        warnings: dict[str, str] = {}
        if any(job is not None and _is_unexplained(job, pod) for job, pod in found):
            with contextlib.suppress(NeedsPerson):  # a right we can do without
                warnings = self.cluster.warnings()
        return [states.status(job, pod, warnings) for job, pod in found]

    def find(self, launch_key: str) -> ReplicaHandle | None:
        handle = self._handle(launching.check_launch_key(launch_key))
        job = self.cluster.read_job(self._name(handle))
        return handle if job is not None and kubernetes_ensure.is_of(job, launch_key) else None

    def live(self) -> list[ReplicaHandle]:
        """Every Job of our deployment that has not ended."""
        found = self.cluster.list_jobs(f"{launching.DEPLOYMENT_LABEL}={self.config.deployment}")
        return [
            self._handle(job["metadata"]["labels"][launching.KEY_LABEL])
            for job in found
            if states.ended(job) is None and launching.KEY_LABEL in job["metadata"]["labels"]
        ]

    def logs(
        self, handle: ReplicaHandle, *, after: str = "", follow: bool = False
    ) -> Iterator[LogLine]:
        """Positions are times of the log: they hold as long as the pod does."""
        (selector,) = self._selectors([handle.launch_key])
        while True:
            # Asked before reading: what is written before the end is then surely read.
            pod = states.newest(self.cluster.list_pods(selector))
            if pod is None:
                job = self.cluster.read_job(self._name(handle))
                over = job is None or states.ended(job) is not None
            else:
                over = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
                for line in self._read(pod, after, follow=follow and not over):
                    after = line.position
                    yield line
            if over or not follow:
                return
            time.sleep(self.poll_s)

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        """See :func:`executors.kubernetes.manifest.cancellation`, and ``withdrawal`` for a Job
        that is suspended."""

        def end(handle: ReplicaHandle) -> None:
            name = self._name(handle)
            with contextlib.suppress(Gone):
                job = self.cluster.patch_job(name, manifest.cancellation())
                if states.is_suspended(job) and states.ended(job) is None:
                    kubernetes_ensure.withdraw(self.cluster, name)

        with ThreadPoolExecutor(launching.LAUNCHES_AT_ONCE, thread_name_prefix="cancel") as pool:
            list(pool.map(end, handles))

    def collect(self, handles: Sequence[ReplicaHandle], timeout: float) -> list[ReplicaStatus]:
        return launching.collect(self.poll, handles, timeout, every_s=self.poll_s)

    def check(self) -> str:
        """Lists our Jobs, so that a credential without rights shows too."""
        self.live()
        found = f"namespace {self.cluster.namespace} of {self.cluster.host}"
        with contextlib.suppress(NeedsPerson):  # not everybody may ask who he is
            found = f"{self.cluster.whoami() or 'a user'} in {found}"
            found += f" (Kubernetes {self.cluster.version()})"
        return found

    def preflight(self, spec: ReplicaSpec, count: int) -> list[Problem]:
        autoscaled = bool(self.config.options.get("autoscaled"))
        try:
            options = kubernetes_options.read(self.config.options, spec.options)
            machine = kubernetes_options.machine(options, spec)
            job = self._job(spec, ["python"], {}, {})
        except LaunchRefused as error:
            return [Problem(field=_field(str(error)), message=str(error))]
        return problems(self.cluster, job, machine, count, autoscaled=autoscaled)

    def _job(
        self,
        spec: ReplicaSpec,
        line: Sequence[str],
        env: Mapping[str, str],
        secrets: Mapping[str, str],
    ) -> Json:
        options = kubernetes_options.read(self.config.options, spec.options)
        return manifest.job(
            manifest.name_of(self.config.deployment, spec.launch_key),
            spec=spec,
            options=options,
            machine=kubernetes_options.machine(options, spec),
            labels=launching.labels_of(self.config, spec),
            command=line,
            env=env,
            secrets=sorted(secrets),
        )

    def _read(self, pod: Json, after: str, *, follow: bool) -> Iterator[LogLine]:
        """What there is to read now; with ``follow`` until the container ends or the line
        breaks."""
        import urllib3

        with contextlib.suppress(Gone):
            since = kubernetes_logs.since(after)
            container = manifest.CONTAINER
            with self.cluster.log(
                pod["metadata"]["name"], container, since=since, follow=follow
            ) as chunks:
                try:
                    yield from kubernetes_logs.behind(kubernetes_logs.lines(chunks), after)
                except urllib3.exceptions.HTTPError as error:
                    if not follow:
                        raise RetryLater(f"the log broke off: {error}") from error

    def _handle(self, launch_key: str) -> ReplicaHandle:
        name = manifest.name_of(self.config.deployment, launch_key)
        data = {"name": name, "namespace": self.cluster.namespace}
        return ReplicaHandle(backend=self.backend, launch_key=launch_key, data=data)

    def _name(self, handle: ReplicaHandle) -> str:
        return manifest.name_of(self.config.deployment, handle.launch_key)

    def _selectors(self, launch_keys: Iterable[str]) -> Iterator[str]:
        """Label selectors that together match the Jobs and pods of the keys."""
        batch: list[str] = []
        for key in dict.fromkeys(launch_keys):
            if sum(map(len, batch)) + len(batch) + len(key) > SELECTOR_CHARS:
                yield self._selector(batch)
                batch = []
            batch.append(key)
        if batch:
            yield self._selector(batch)

    def _selector(self, launch_keys: Sequence[str]) -> str:
        return (
            f"{launching.DEPLOYMENT_LABEL}={self.config.deployment},"
            f"{launching.KEY_LABEL} in ({','.join(launch_keys)})"
        )


def _owner(pod: Json) -> str:
    """The name of a pod's Job, by the label that every supported version sets."""
    labels = pod["metadata"].get("labels") or {}
    return str(labels.get("batch.kubernetes.io/job-name") or labels.get("job-name", ""))


def _is_unexplained(job: Json, pod: Json | None) -> bool:
    if states.status(job, pod).state is not JobState.PENDING:
        return False
    made = states.seconds(job["metadata"].get("creationTimestamp"))
    _, message, _ = states.waits_for(job, pod, {})
    return not message and made is not None and time.time() - made > UNEXPLAINED_S


def _field(message: str) -> str:
    """The part of the spec that a refusal is about, by its first word."""
    first = re.split(r"\W", message, maxsplit=1)[0]
    return _FIELDS.get(first, "options")
