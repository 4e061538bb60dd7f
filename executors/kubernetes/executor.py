"""Replicas as Jobs of a Kubernetes cluster, through the official client.

::

    launch key --sha256--> Job  <name>     one pod, one completion, no retries
                           Secret <name>   owned by the Job, deleted with it
    labels archipelago-deployment, archipelago-key, archipelago-replica on all of them

The Job's name is derived from the deployment and the launch key, so the API refuses the second of
two creations, and ``ensure`` continues with the first. A Job with secrets is created in three
steps, each of which the next ``ensure`` repeats or skips: the Job, suspended; the Secret, owned by
the Job, so that it never outlives it; a patch that marks the Job as complete and resumes it, or
adds it to its queue. No pod starts without its Secret. An attempt that is abandoned at any step
leaves one suspended Job, which ``live`` lists and ``cancel`` ends.

``cancel`` does not delete the Job, because its key could then start again. It sets a deadline in
the past: the cluster ends the pod with its grace period and marks the Job as failed. The cluster
deletes such pods, and their logs with them.

``poll`` reads two lists, of Jobs and of pods, for any number of handles (and a third, of warnings,
while a Job waits without a reason in its pod). An ended Job remains for ``keep_s`` seconds; later
it counts as lost.

Requires Kubernetes 1.28. Not supported: indexed or parallel Jobs (a replica is one pod; several
GPUs of one node belong to one replica) and watches: the control plane polls.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from executors import launching
from executors.base import (
    AccountError,
    Capabilities,
    ExecutorConfig,
    JobRequest,
    JobState,
    LaunchRefused,
    LogLine,
    Problem,
    ReplicaHandle,
    ReplicaSpec,
    ReplicaStatus,
    RetryLater,
)
from executors.executor import Executor
from executors.kubernetes import ensure as kubernetes_ensure
from executors.kubernetes import logs as kubernetes_logs
from executors.kubernetes import manifest
from executors.kubernetes import options as kubernetes_options
from executors.kubernetes import status as states
from executors.kubernetes.auth import CREDENTIAL, connection
from executors.kubernetes.client import Cluster, Gone
from executors.kubernetes.options import Options
from executors.kubernetes.preflight import problems
from executors.options import Json

SELECTOR_CHARS = 4_000
"""Maximum length of a label selector: it is part of the URL, which proxies limit to 8 KB."""

UNEXPLAINED_S = 10.0
"""Warnings are read for a Job that waits this long without a reason in its pod."""


_FIELDS = {"image": "image", "hardware": "hardware", "spot": "spot", "label": "labels"}


class KubernetesExecutor(Executor):
    """Jobs in one namespace. Options and credentials: ``docs/backends/kubernetes.md``."""

    backend = "kubernetes"

    def __init__(self, config: ExecutorConfig) -> None:
        self.config = config
        kubernetes_options.check_label("deployment", config.deployment)
        self.options = launching.job_options(Options, config.options, {})
        self.capabilities = Capabilities(spot=bool(self.options.spot))
        self.poll_s = self.options.poll_s
        self._cluster: Cluster | None = None
        self._lock = threading.Lock()

    @property
    def cluster(self) -> Cluster:
        """Created on first use. Raises :class:`AccountError` without a usable credential."""
        with self._lock:
            if self._cluster is None:
                configuration, namespace = connection(
                    self.config.credentials.get(CREDENTIAL, ""), context=self.options.context
                )
                self._cluster = Cluster(
                    configuration,
                    self.options.namespace or namespace,
                    answer_s=self.options.answer_s,
                )
            return self._cluster

    def start(self, job: JobRequest) -> ReplicaHandle:
        """Bring the Job and the Secret of one attempt to the wanted state."""
        queue = self._options(job.spec).queue
        kubernetes_ensure.ensure(self.cluster, self._job(job), job.secrets, queue=queue)
        return self._handle(job.spec.launch_key)

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        jobs: dict[str, Json] = {}
        pods: defaultdict[str, list[Json]] = defaultdict(list)
        for selector in self._selectors(handle.launch_key for handle in handles):
            # Jobs first: the pod of an ended Job is then in its final state.
            jobs |= {job["metadata"]["name"]: job for job in self.cluster.list_jobs(selector)}
            for pod in self.cluster.list_pods(selector):
                pods[_owner(pod)].append(pod)
        found = [(jobs.get(name), states.newest(pods[name])) for name in map(self._name, handles)]
        warnings: dict[str, str] = {}
        if any(job is not None and _is_unexplained(job, pod) for job, pod in found):
            with contextlib.suppress(AccountError):  # an optional permission
                warnings = self.cluster.warnings()
        return [states.status(job, pod, warnings) for job, pod in found]

    def find(self, launch_key: str) -> ReplicaHandle | None:
        handle = self._handle(launching.check_launch_key(launch_key))
        job = self.cluster.read_job(self._name(handle))
        return handle if job is not None and kubernetes_ensure.is_of(job, launch_key) else None

    def live(self) -> list[ReplicaHandle]:
        """Every Job of the deployment that has not ended."""
        found = self.cluster.list_jobs(f"{launching.DEPLOYMENT_LABEL}={self.config.deployment}")
        return [
            self._handle(job["metadata"]["labels"][launching.KEY_LABEL])
            for job in found
            if states.ended(job) is None and launching.KEY_LABEL in job["metadata"]["labels"]
        ]

    def logs(
        self, handle: ReplicaHandle, *, after: str = "", follow: bool = False
    ) -> Iterator[LogLine]:
        """Positions are times of the log, valid as long as the pod exists."""
        (selector,) = self._selectors([handle.launch_key])
        while True:
            # Read the state first: output written before the end is then complete.
            pod = states.newest(self.cluster.list_pods(selector))
            if pod is None:
                job = self.cluster.read_job(self._name(handle))
                ended = job is None or states.ended(job) is not None
            else:
                ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
                for line in self._read(pod, after, follow=follow and not ended):
                    after = line.position
                    yield line
            if ended or not follow:
                return
            time.sleep(self.poll_s)

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        """See :func:`executors.kubernetes.manifest.cancellation`, and ``withdrawal`` for suspended
        Jobs."""

        def end(handle: ReplicaHandle) -> None:
            name = self._name(handle)
            with contextlib.suppress(Gone):
                job = self.cluster.patch_job(name, manifest.cancellation())
                if states.is_suspended(job) and states.ended(job) is None:
                    kubernetes_ensure.withdraw(self.cluster, name)

        launching.call_each(end, handles)

    def check(self) -> str:
        """Also lists the deployment's Jobs, to check the permissions of the credential."""
        self.live()
        where = f"namespace {self.cluster.namespace} of {self.cluster.host}"
        with contextlib.suppress(
            AccountError
        ):  # the permission to read the own identity is optional
            where = f"{self.cluster.whoami() or 'a user'} in {where}"
            where += f" (Kubernetes {self.cluster.version()})"
        return where

    def preflight(self, spec: ReplicaSpec, count: int) -> list[Problem]:
        try:
            options = self._options(spec)
            machine = kubernetes_options.machine(options, spec)
            job = self._job(JobRequest(spec=spec, entrypoint="preflight"))
        except LaunchRefused as error:
            return [Problem(field=_field(str(error)), message=str(error))]
        return problems(self.cluster, job, machine, count, autoscaled=options.autoscaled)

    def _options(self, spec: ReplicaSpec) -> Options:
        return launching.job_options(Options, self.config.options, spec.options)

    def _job(self, request: JobRequest) -> Json:
        options = self._options(request.spec)
        return manifest.job(
            manifest.name_of(self.config.deployment, request.spec.launch_key),
            request,
            options=options,
            machine=kubernetes_options.machine(options, request.spec),
            labels=launching.labels_of(self.config, request.spec),
        )

    def _read(self, pod: Json, after: str, *, follow: bool) -> Iterator[LogLine]:
        """The available lines; with ``follow`` until the container or the connection ends."""
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
                        raise RetryLater(f"the log was interrupted: {error}") from error

    def _handle(self, launch_key: str) -> ReplicaHandle:
        name = manifest.name_of(self.config.deployment, launch_key)
        data = {"name": name, "namespace": self.cluster.namespace}
        return ReplicaHandle(backend=self.backend, launch_key=launch_key, data=data)

    def _name(self, handle: ReplicaHandle) -> str:
        return manifest.name_of(self.config.deployment, handle.launch_key)

    def _selectors(self, launch_keys: Iterable[str]) -> Iterator[str]:
        """Label selectors that together match the Jobs and pods of all keys."""
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
    """The field of the spec that an error message refers to by its first word."""
    first = re.split(r"\W", message, maxsplit=1)[0]
    return _FIELDS.get(first, "options")
