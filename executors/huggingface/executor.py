"""Hugging Face Jobs: each replica is a job of the Hub, in a container of a flavour.

Jobs have no unique names, so one is known by its *labels*: deployment, launch key and replica. A
launch looks for its key first, and again when it was not answered (a submission that is answered
500 or not at all may have started a job). When two launches of one key race, each looks
again behind its own: the oldest job is the one that :meth:`HFJobsExecutor.find` names, and a
younger one is cancelled by who started it or, where that failed, by the reaper, which sees
every job in :meth:`HFJobsExecutor.live`.

A job is given its timeout always; the Hub's own default of 30 minutes is never used. Its seconds
are a label too, because the Hub does not tell them back. How a job ended is read from the words of
its status: see :mod:`executors.huggingface.status`.

Credentials: ``HF_TOKEN``, a token that may start and manage Jobs. Options:
:class:`executors.huggingface.request.Options`; of a spec: ``volumes``. Hardware is a flavour;
``cpu`` is ``cpu-basic``.

Left out: schedules, exposed ports, network groups, and what else a Job can be that a replica never
asks for.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from huggingface_hub import JobInfo
from huggingface_hub.errors import HfHubHTTPError, JobNotFoundError

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
from executors.bootstrap import command as bootstrap
from executors.catalogue import Table
from executors.huggingface.client import Hub, each
from executors.huggingface.hardware import table_of
from executors.huggingface.request import LABEL_CHARS, Options, flavour, label, unsound, volumes_of
from executors.huggingface.status import ENDED, LIVE, LOST, TIMEOUT_LABEL, precedence, status_of
from executors.launching import DEPLOYMENT_LABEL, KEY_LABEL

SCHEDULING_TIME = timedelta(days=1)
"""How long a job is taken to wait in SCHEDULING at most, beside its deadline: users report half a
day (github.com/huggingface/huggingface_hub/issues/4376)."""


class HFJobsExecutor(launching.LaunchReplicas):
    """Runs replicas as Jobs of the Hugging Face Hub."""

    backend = "huggingface"

    def __init__(self, config: ExecutorConfig) -> None:
        """Raises :class:`ValueError` for options nobody knows or a deployment that no label can
        carry."""
        if label(config.deployment) != config.deployment or not config.deployment:
            raise ValueError(
                f"deployment: expected 1 to {LABEL_CHARS} letters, digits, '-' or '_', "
                f"found {config.deployment!r}"
            )
        self.config = config
        self.options = Options.read(config.options)
        self.capabilities = Capabilities(
            max_lifetime_s=self.options.max_timeout_s, unique_names=False
        )
        self._hub = Hub(
            token=config.credentials.get("HF_TOKEN"),
            endpoint=self.options.endpoint,
            patience_s=self.options.request_timeout_s,
        )
        self._clock: Callable[[], datetime] = lambda: datetime.now(UTC)
        self._ended: dict[str, ReplicaStatus] = {}  # an end is final: not asked for again

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
        """See :meth:`executors.base.ServerlessExecutor.ensure`. For each job a look by its
        labels and ``POST /api/jobs/{namespace}``, then one look for all."""
        request = launching.prepare(specs, entrypoint_args)
        command = bootstrap.command(entrypoint, request.args, code=code)
        started: list[ReplicaHandle] = []
        _ = self._namespace  # asked for here once, not by each thread

        def start(spec: ReplicaSpec) -> ReplicaHandle:
            if (found := self._settled(spec.launch_key)) is not None:
                return found
            plain, hidden = request.environment(spec, env=env, secrets=secrets)
            handle = self._run(spec, command, {"PYTHONUNBUFFERED": "1", **plain}, hidden)
            started.append(handle)
            return handle

        handles = launching.launch_each(start, request.specs)
        winners = self._winners(started)
        return [winners.get(handle.launch_key, handle) for handle in handles]

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """One job is asked for itself. Of several the living come in one list, and what that lacks
        (it has ended since) is asked for itself, once: an end is remembered."""
        wanted = defaultdict(set)
        for handle in handles:
            if handle.data["job_id"] not in self._ended:
                wanted[handle.data["namespace"]].add(handle.data["job_id"])
        found: dict[str, ReplicaStatus] = {}
        for namespace, ids in wanted.items():
            if len(ids) > 1:
                living = self._hub.jobs(namespace, labels=self._ours(), stages=LIVE)
                found.update((job.id, status_of(job)) for job in living if job.id in ids)
            rest = [job_id for job_id in sorted(ids) if job_id not in found]
            told = each(functools.partial(self._inspect, namespace), rest)
            found.update(zip(rest, told, strict=True))
        self._ended.update(
            (job_id, status)
            for job_id, status in found.items()
            if status.state is JobState.ENDED and status is not LOST
        )
        known = {**self._ended, **found}
        return [known[handle.data["job_id"]] for handle in handles]

    def find(self, launch_key: str) -> ReplicaHandle | None:
        """The job of that key: of several the oldest that lives, then the oldest that ended by
        itself."""
        jobs = self._of_key(launch_key)
        return self._handle(jobs[0]) if jobs else None

    def live(self) -> list[ReplicaHandle]:
        """Every job of the deployment that has not ended, oldest first; two jobs of one key are
        two handles.

        Two lists: the jobs at the stages that are known to be live, and the jobs that are young
        enough to run at all, without a filter, so that a stage which is new at the Hub hides none.
        """
        since = self._clock() - timedelta(seconds=self.options.max_timeout_s) - SCHEDULING_TIME
        listed = [
            *self._hub.jobs(self._namespace, labels=self._ours(), stages=LIVE),
            *self._hub.jobs(self._namespace, labels=self._ours(), since=since),
        ]
        found = {job.id: job for job in listed if str(job.status.stage) not in ENDED}
        jobs = sorted(found.values(), key=precedence)
        return [self._handle(job) for job in jobs if KEY_LABEL in (job.labels or {})]

    def _of_key(self, launch_key: str) -> list[JobInfo]:
        """The jobs of that key, the one that counts first."""
        labels = {**self._ours(), KEY_LABEL: launching.check_launch_key(launch_key)}
        return sorted(self._hub.jobs(self._namespace, labels=labels), key=precedence)

    def _settled(self, launch_key: str) -> ReplicaHandle | None:
        """The job of that key, after its younger duplicates were cancelled."""
        jobs = self._of_key(launch_key)
        for job in jobs[1:]:
            if str(job.status.stage) not in ENDED:
                self._cancel(self._handle(job))
        return self._handle(jobs[0]) if jobs else None

    def logs(
        self, handle: ReplicaHandle, *, after: str = "", follow: bool = False
    ) -> Iterator[LogLine]:
        """A position is the number of lines before. The Hub sends a job's lines from the first one
        every time, so those behind ``after`` are skipped here. Without ``follow`` the lines of a
        job that runs take five seconds: ``fetch_job_logs`` waits for the stream to fall silent."""
        if after and not after.isdigit():
            raise ValueError(f"position: expected a number of lines, found {after!r}")
        skip = int(after or 0)
        lines = None
        for number in itertools.count(1):
            with self._hub.calling() as api:
                try:
                    lines = lines or iter(
                        api.fetch_job_logs(
                            job_id=handle.data["job_id"],
                            namespace=handle.data["namespace"],
                            follow=follow,
                        )
                    )
                    text = next(lines)
                except (StopIteration, JobNotFoundError):
                    return
            if number > skip:
                yield LogLine(text=text, position=str(number))

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        each(self._cancel, handles)

    def collect(self, handles: Sequence[ReplicaHandle], timeout: float) -> list[ReplicaStatus]:
        return launching.collect(self.poll, handles, timeout, every_s=self.options.poll_s)

    def check(self) -> str:
        """Asks ``GET /api/whoami-v2`` and, because a token may lack the permission, for jobs."""
        with self._hub.calling() as api:
            who = api.whoami()
        wanted = self.options.namespace or who["name"]
        orgs = {org["name"]: org for org in who.get("orgs", ())}
        if wanted not in (who["name"], *orgs) and not re.fullmatch(r"[0-9a-f]{24}", wanted):
            raise NeedsPerson(
                f"namespace: expected {' or '.join((who['name'], *orgs))}, found {wanted!r}"
            )
        self._hub.jobs(wanted, labels=self._ours(), stages=LIVE)
        token = (who.get("auth") or {}).get("accessToken") or {}
        if wanted == who["name"]:
            owner = f"{wanted} ({'PRO' if who.get('isPro') else 'no PRO'})"
        else:
            org = orgs.get(wanted, {})
            about = [str(org[name]) for name in ("plan", "roleInOrg") if org.get(name)]
            owner = f"{wanted} ({', '.join(about) or 'organisation'}) as {who['name']}"
        return (
            f"{owner}, token {token.get('displayName', '')!r} with role "
            f"{token.get('role', 'unknown')}"
        )

    def preflight(self, spec: ReplicaSpec, count: int) -> list[Problem]:
        """Whether the token works, the flavour is on offer and the request is sound. The Hub tells
        neither credit nor capacity before a launch."""
        problems = unsound(spec, self.options)
        try:
            self.check()
            offered = [hardware.name for hardware in self.hardware().hardware]
        except LaunchRefused as error:
            return [*problems, Problem(field="credential", message=str(error))]
        if flavour(spec) not in offered:
            message = f"expected one of {', '.join(offered)}, found {spec.hardware!r}"
            problems.append(Problem(field="hardware", message=message))
        return problems

    def hardware(self) -> Table:
        """What the Hub offers now and at what price: ``GET /api/jobs/hardware``."""
        with self._hub.calling() as api:
            told = api.list_jobs_hardware()
        return table_of(
            told,
            read_on=time.strftime("%Y-%m-%d", time.gmtime()),
            source=f"{self._hub.api.endpoint}/api/jobs/hardware",
        )

    @property
    def _namespace(self) -> str:
        return self.options.namespace or self._hub.user()

    def _ours(self) -> dict[str, str]:
        return {DEPLOYMENT_LABEL: self.config.deployment}

    def _handle(self, job: JobInfo) -> ReplicaHandle:
        return ReplicaHandle(
            backend=self.backend,
            launch_key=(job.labels or {})[KEY_LABEL],
            data={"job_id": job.id, "namespace": self._namespace},
        )

    def _run(
        self, spec: ReplicaSpec, command: list[str], env: dict[str, str], hidden: dict[str, str]
    ) -> ReplicaHandle:
        if wrong := unsound(spec, self.options):
            problem = wrong[0]
            raise LaunchRefused(f"{spec.launch_key}: {problem.field}: {problem.message}")
        timeout_s = math.ceil(spec.timeout_s or self.options.max_timeout_s)
        labels = {
            label(name): label(value)
            for name, value in launching.labels_of(self.config, spec).items()
            if name != "name"  # which is the Hub's own, and the launch key here
        }
        try:
            with self._hub.calling(hidden.values()) as api:
                job = api.run_job(
                    image=spec.image or self.options.image,
                    command=command,
                    env=env,
                    secrets=hidden,
                    flavor=flavour(spec),
                    timeout=timeout_s,
                    name=spec.launch_key,
                    labels={**labels, TIMEOUT_LABEL: str(timeout_s)},
                    volumes=volumes_of(spec, self.options),
                    namespace=self._namespace,
                )
        except RetryLater:
            # It may run all the same: users report jobs behind answers of 500.
            with contextlib.suppress(RetryLater):
                if (found := self._settled(spec.launch_key)) is not None:
                    return found
            raise
        except NeedsPerson:
            raise
        except LaunchRefused as error:
            raise LaunchRefused(f"{spec.launch_key} on {spec.hardware}: {error}") from error
        return self._handle(job)

    def _winners(self, started: Sequence[ReplicaHandle]) -> dict[str, ReplicaHandle]:
        """By launch key the oldest living job, where that is not the one just ``started``, which
        is then cancelled."""
        found: dict[str, ReplicaHandle] = {}
        if not started:
            return found
        with contextlib.suppress(RetryLater):  # both run, then: the reaper's to see
            oldest: dict[str, ReplicaHandle] = {}
            for handle in self.live():
                oldest.setdefault(handle.launch_key, handle)
            for handle in started:
                winner = oldest.get(handle.launch_key, handle)
                if winner != handle:
                    found[handle.launch_key] = winner
                    self._cancel(handle)
        return found

    def _inspect(self, namespace: str, job_id: str) -> ReplicaStatus:
        with self._hub.calling() as api:
            try:
                return status_of(api.inspect_job(job_id=job_id, namespace=namespace))
            except JobNotFoundError:
                return LOST

    def _cancel(self, handle: ReplicaHandle) -> None:
        job_id, namespace = handle.data["job_id"], handle.data["namespace"]
        with self._hub.calling() as api:
            try:
                api.cancel_job(job_id=job_id, namespace=namespace)
            except JobNotFoundError:
                pass
            except HfHubHTTPError as error:
                # What the Hub answers for a job that has ended is not documented.
                perhaps = error.response.status_code in (400, 409, 410, 422)
                if not perhaps or self._inspect(namespace, job_id).state is not JobState.ENDED:
                    raise
