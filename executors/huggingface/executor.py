"""Hugging Face Jobs: each replica is a job of the Hub, in a container of a flavour.

Jobs have no unique names, so a job is identified by its *labels*: deployment, launch key and
replica. A launch first looks for its key, and looks again after a failed request, because a
submission that is answered with 500, or not at all, can still have started a job. When two launches
of one key race, each looks again after its own submission: the oldest job represents the key in
:meth:`HFJobsExecutor.find`, and the younger one is cancelled by its launcher or, where that failed,
by the reaper, which sees every job in :meth:`HFJobsExecutor.live`.

Every job gets an explicit timeout instead of the Hub's default of 30 minutes. The timeout is also a
label, because the Hub does not return it. The cause of an end is read from the message of the
status: see :mod:`executors.huggingface.status`.

Credentials: ``HF_TOKEN``, a token that can start and manage Jobs. Options:
:class:`executors.huggingface.options.Options`; of a spec, only ``volumes``. Hardware is a flavour;
``cpu`` is ``cpu-basic``.

Not supported: schedules, exposed ports and network groups.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

from huggingface_hub import JobInfo
from huggingface_hub.errors import HfHubHTTPError, JobNotFoundError

from executors import launching
from executors import options as declared
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
from executors.bootstrap import command as bootstrap
from executors.catalogue import Table
from executors.executor import Executor
from executors.huggingface.client import Hub
from executors.huggingface.hardware import table_of
from executors.huggingface.options import Options
from executors.huggingface.request import LABEL_CHARS, flavour, label, volumes_of
from executors.huggingface.status import ENDED, LIVE, LOST, TIMEOUT_LABEL, precedence, status_of
from executors.launching import DEPLOYMENT_LABEL, KEY_LABEL

SCHEDULING_TIME = timedelta(days=1)
"""Assumed maximum time in SCHEDULING, in addition to the deadline: users report half a day
(github.com/huggingface/huggingface_hub/issues/4376)."""


class HFJobsExecutor(Executor):
    """Runs replicas as Jobs of the Hugging Face Hub."""

    backend = "huggingface"

    def __init__(self, config: ExecutorConfig) -> None:
        """Raises :class:`ValueError` for invalid options or a deployment that is no valid label."""
        if label(config.deployment) != config.deployment or not config.deployment:
            raise ValueError(
                f"deployment: expected 1 to {LABEL_CHARS} letters, digits, '-' or '_', "
                f"found {config.deployment!r}"
            )
        self.config = config
        self.options = declared.read(Options, config.options)
        self.poll_s = self.options.poll_s
        self.capabilities = Capabilities(
            max_lifetime_s=self.options.max_timeout_s, unique_names=False
        )
        self._hub = Hub(
            token=config.credentials.get("HF_TOKEN"),
            endpoint=self.options.endpoint,
            patience_s=self.options.request_timeout_s,
        )
        self._clock: Callable[[], datetime] = lambda: datetime.now(UTC)
        self._ended: dict[str, ReplicaStatus] = {}  # final states, not polled again

    def start_all(self, jobs: Sequence[JobRequest]) -> list[ReplicaHandle]:
        """For each job, a lookup by its labels and ``POST /api/jobs/{namespace}``; then one lookup
        for all."""
        started: list[ReplicaHandle] = []
        _ = self._namespace  # read once here instead of in each thread

        def start(request: JobRequest) -> ReplicaHandle:
            existing = self._settled(request.spec.launch_key)
            if existing is not None:
                return existing
            handle = self._run(request)
            started.append(handle)
            return handle

        handles = launching.call_each(start, jobs)
        winners = self._winners(started)
        return [winners.get(handle.launch_key, handle) for handle in handles]

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """A single job is read directly. Several live jobs come from one list; jobs missing there
        have ended and are read directly, once, because ends are cached."""
        to_poll = defaultdict(set)
        for handle in handles:
            if handle.data["job_id"] not in self._ended:
                to_poll[handle.data["namespace"]].add(handle.data["job_id"])
        found: dict[str, ReplicaStatus] = {}
        for namespace, ids in to_poll.items():
            if len(ids) > 1:
                living = self._hub.jobs(namespace, labels=self._ours(), stages=LIVE)
                found.update((job.id, status_of(job)) for job in living if job.id in ids)
            rest = [job_id for job_id in sorted(ids) if job_id not in found]
            inspected = launching.call_each(functools.partial(self._inspect, namespace), rest)
            found.update(zip(rest, inspected, strict=True))
        self._ended.update(
            (job_id, status)
            for job_id, status in found.items()
            if status.state is JobState.ENDED and status is not LOST
        )
        known = {**self._ended, **found}
        return [known[handle.data["job_id"]] for handle in handles]

    def find(self, launch_key: str) -> ReplicaHandle | None:
        """The job of that key; of several the oldest live one, then the oldest that ended by
        itself."""
        jobs = self._of_key(launch_key)
        return self._handle(jobs[0]) if jobs else None

    def live(self) -> list[ReplicaHandle]:
        """Every job of the deployment that has not ended, oldest first; two jobs of one key give
        two handles.

        Two lists are read: jobs at the known live stages, and all jobs that are young enough to be
        running, so that an unknown stage of the Hub hides no job.
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
        """The jobs of that key; the first represents the key."""
        labels = {**self._ours(), KEY_LABEL: launching.check_launch_key(launch_key)}
        return sorted(self._hub.jobs(self._namespace, labels=labels), key=precedence)

    def _settled(self, launch_key: str) -> ReplicaHandle | None:
        """Cancel duplicates of that key and return its job, or None."""
        jobs = self._of_key(launch_key)
        for job in jobs[1:]:
            if str(job.status.stage) not in ENDED:
                self._cancel(self._handle(job))
        return self._handle(jobs[0]) if jobs else None

    def logs(
        self, handle: ReplicaHandle, *, after: str = "", follow: bool = False
    ) -> Iterator[LogLine]:
        """A position is a line number. The Hub always sends a log from the first line, so the lines
        up to ``after`` are skipped here. Without ``follow``, reading the log of a running job takes
        five seconds: ``fetch_job_logs`` waits for the stream to become silent."""
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
        launching.call_each(self._cancel, handles)

    def check(self) -> str:
        """Read ``GET /api/whoami-v2``, and list jobs to check the token's permission."""
        with self._hub.calling() as api:
            who = api.whoami()
        namespace = self.options.namespace or who["name"]
        orgs = {org["name"]: org for org in who.get("orgs", ())}
        if namespace not in (who["name"], *orgs) and not re.fullmatch(r"[0-9a-f]{24}", namespace):
            raise AccountError(
                f"namespace: expected {' or '.join((who['name'], *orgs))}, found {namespace!r}"
            )
        self._hub.jobs(namespace, labels=self._ours(), stages=LIVE)
        token = (who.get("auth") or {}).get("accessToken") or {}
        if namespace == who["name"]:
            owner = f"{namespace} ({'PRO' if who.get('isPro') else 'no PRO'})"
        else:
            org = orgs.get(namespace, {})
            about = [str(org[name]) for name in ("plan", "roleInOrg") if org.get(name)]
            owner = f"{namespace} ({', '.join(about) or 'organisation'}) as {who['name']}"
        return (
            f"{owner}, token {token.get('displayName', '')!r} with role "
            f"{token.get('role', 'unknown')}"
        )

    def preflight(self, spec: ReplicaSpec, count: int) -> list[Problem]:
        """Check the token, the flavour and the request. The Hub reports neither credit nor capacity
        before a launch."""
        problems = self.problems(spec)
        try:
            self.check()
            offered = [hardware.name for hardware in self.hardware().hardware]
        except LaunchRefused as error:
            return [*problems, Problem(field="credential", message=str(error))]
        if flavour(spec) not in offered:
            message = f"expected one of {', '.join(offered)}, found {spec.hardware!r}"
            problems.append(Problem(field="hardware", message=message))
        return problems

    def problems(self, spec: ReplicaSpec) -> list[Problem]:
        found = super().problems(spec)
        if spec.region:
            message = f"expected no region: the Hub chooses, found {spec.region!r}"
            found.append(Problem(field="region", message=message))
        try:
            volumes_of(spec, self.options)
        except ValueError as error:
            found.append(Problem(field="options", message=str(error)))
        return found

    def hardware(self) -> Table:
        """Current hardware and prices: ``GET /api/jobs/hardware``."""
        with self._hub.calling() as api:
            flavours = api.list_jobs_hardware()
        return table_of(
            flavours,
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

    def _run(self, request: JobRequest) -> ReplicaHandle:
        spec = request.spec
        self.check_spec(spec)
        timeout_s = math.ceil(spec.timeout_s or self.options.max_timeout_s)
        labels = {
            label(name): label(value)
            for name, value in launching.labels_of(self.config, spec).items()
            if name != "name"  # the Hub's own label
        }
        try:
            with self._hub.calling() as api:
                job = api.run_job(
                    image=spec.image or self.options.image,
                    command=bootstrap.command(request.entrypoint, request.args, code=request.code),
                    env={"PYTHONUNBUFFERED": "1", **request.env},
                    secrets=dict(request.secrets),
                    flavor=flavour(spec),
                    timeout=timeout_s,
                    name=spec.launch_key,
                    labels={**labels, TIMEOUT_LABEL: str(timeout_s)},
                    volumes=volumes_of(spec, self.options),
                    namespace=self._namespace,
                )
        except RetryLater:
            # The job can exist: users report jobs after responses of 500.
            with contextlib.suppress(RetryLater):
                if (existing := self._settled(spec.launch_key)) is not None:
                    return existing
            raise
        except AccountError:
            raise
        except LaunchRefused as error:
            raise LaunchRefused(f"{spec.launch_key} on {spec.hardware}: {error}") from error
        return self._handle(job)

    def _winners(self, started: Sequence[ReplicaHandle]) -> dict[str, ReplicaHandle]:
        """The oldest live job of each launch key that is older than the job just ``started``; the
        younger job is cancelled."""
        winners: dict[str, ReplicaHandle] = {}
        if not started:
            return winners
        with contextlib.suppress(RetryLater):  # both jobs run until the reaper ends one
            oldest: dict[str, ReplicaHandle] = {}
            for handle in self.live():
                oldest.setdefault(handle.launch_key, handle)
            for handle in started:
                winner = oldest.get(handle.launch_key, handle)
                if winner != handle:
                    winners[handle.launch_key] = winner
                    self._cancel(handle)
        return winners

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
                # The response for a job that has ended is not documented.
                may_have_ended = error.response.status_code in (400, 409, 410, 422)
                if (
                    not may_have_ended
                    or self._inspect(namespace, job_id).state is not JobState.ENDED
                ):
                    raise
