"""Replicas as Amazon SageMaker training jobs of one instance each, through boto3.

The name of a job consists of the deployment and the launch key
(:func:`executors.sagemaker.request.job_name`). An account accepts a name once per region and for
all time, so a repeated launch gets ``ResourceInUse`` and finds the existing job. The jobs of a
deployment are listed by their common prefix, in the regions of the option ``regions`` (by default
the SDK's region).

The image's own ``train`` program is not used: the job runs the replica's command. It accesses the
rendezvous by its execution role; :mod:`executors.sagemaker.secrets` describes other secrets.

:meth:`SageMakerExecutor.poll` lists the jobs in progress, a hundred per page, and describes only
jobs that are missing from the list, new, or changed. That cache is the executor's only state. An
interrupted managed spot job is stopped; :mod:`executors.sagemaker.status` gives the reason.

Options: :class:`executors.sagemaker.options.Options`. Credentials: ``AWS_ACCESS_KEY_ID``,
``AWS_SECRET_ACCESS_KEY``, ``AWS_SESSION_TOKEN``, ``AWS_DEFAULT_REGION``, ``AWS_ENDPOINT_URL_*``.
Not supported: jobs of several instances, warm pools, SageMaker's checkpoints and metrics.
API: docs.aws.amazon.com/sagemaker/latest/APIReference/ (CreateTrainingJob, DescribeTrainingJob,
ListTrainingJobs, StopTrainingJob, ListTags).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from executors import launching
from executors import options as declared
from executors.base import (
    AccountError,
    Capabilities,
    Cause,
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
from executors.executor import Executor
from executors.sagemaker import preflight as sagemaker_preflight
from executors.sagemaker import status as sagemaker_status
from executors.sagemaker.client import Clients
from executors.sagemaker.jobs import Jobs
from executors.sagemaker.launch import Launcher
from executors.sagemaker.logs import Tail
from executors.sagemaker.options import Options
from executors.sagemaker.request import job_name, options_of, output_path


class SageMakerExecutor(Executor):
    """Training jobs of one AWS account."""

    backend = "sagemaker"

    def __init__(self, config: ExecutorConfig) -> None:
        self.config = config
        try:
            self.options = declared.read(Options, config.options)
        except ValueError as error:
            raise AccountError(str(error)) from error
        self.poll_s = self.options.poll_s
        self._clients = Clients(config.credentials, answer_s=self.options.answer_s)
        self._jobs = Jobs(self._clients, config.deployment)
        self._launcher = Launcher(self._clients, self._jobs, config)
        default = self._clients.default_region()
        self.regions = self.options.regions or ((default,) if default else ())
        self.capabilities = Capabilities(
            max_lifetime_s=self.options.max_runtime_s, spot=True, regions=self.regions
        )
        self._seen: dict[str, tuple[object, ReplicaStatus]] = {}

    def start(self, job: JobRequest) -> ReplicaHandle:
        """Start one training job; see :meth:`executors.executor.Executor.ensure`."""
        spec = job.spec
        self.check_spec(spec)
        options, region = options_of(self.options, spec), self._region(spec)
        command = bootstrap.packed_command(
            job.entrypoint, job.args, python=options.python, code=job.code
        )
        output = output_path(options, job.code)
        name = self._launcher.start(job, options, region=region, command=command, output=output)
        return self._handle(spec.launch_key, region, name)

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """Also stops interrupted spot jobs. Raises :class:`RetryLater` if AWS is unreachable."""
        regions = {handle.data["region"] for handle in handles}
        listed = {region: self._jobs.of_status(region, "InProgress") for region in regions}
        statuses = [self._by_list(handle, listed[handle.data["region"]]) for handle in handles]
        left = [handle for handle, status in zip(handles, statuses, strict=True) if status is None]
        described = iter(launching.call_each(self._by_description, left))
        return [status or next(described) for status in statuses]

    def find(self, launch_key: str) -> ReplicaHandle | None:
        name = job_name(self.config.deployment, launching.check_launch_key(launch_key))
        for region in self._known_regions():
            if self._jobs.describe(region, name) is not None:
                return self._handle(launch_key, region, name)
        return None

    def live(self) -> list[ReplicaHandle]:
        """Deletes the secrets of jobs that are over, too, where the account may list secrets."""
        found = []
        for region in self._known_regions():
            summaries = {
                **self._jobs.of_status(region, "InProgress"),
                **self._jobs.of_status(region, "Stopping"),
            }
            for name, summary in summaries.items():
                key = self._jobs.launch_key(region, summary)
                found.append(self._handle(key, region, name))
            self._jobs.sweep(region, summaries)
        return found

    def logs(
        self, handle: ReplicaHandle, *, after: str = "", follow: bool = False
    ) -> Iterator[LogLine]:
        region, name = handle.data["region"], handle.data["name"]
        tail = Tail(self._clients.get("logs", region), name, after)
        while follow and not self._jobs.has_ended(region, name):
            yield from tail.lines()
            time.sleep(self.options.poll_s)
        yield from tail.lines()
        if follow:  # the last lines arrive some time after the reported end
            time.sleep(self.options.poll_s)
            yield from tail.lines()

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        """SageMaker sends SIGTERM, and SIGKILL two minutes later."""
        launching.call_each(lambda h: self._jobs.stop(h.data["region"], h.data["name"]), handles)

    def check(self) -> str:
        regions = self._known_regions()
        [(account, arn), *_] = [
            sagemaker_preflight.identity_of(self._clients, where) for where in regions
        ]
        return f"AWS account {account} as {arn}, in {', '.join(regions)}"

    def preflight(self, spec: ReplicaSpec, count: int) -> list[Problem]:
        try:
            region = self._region(spec)
        except LaunchRefused as error:
            field = "credential" if isinstance(error, AccountError) else "region"
            return [Problem(field=field, message=str(error))]
        try:
            options = options_of(self.options, spec)
        except LaunchRefused as error:
            return [Problem(field="options", message=str(error))]
        found = sagemaker_preflight.problems(self._clients, options, spec, count, region=region)
        return [*self.problems(spec), *found]

    def _by_list(
        self, handle: ReplicaHandle, listed: Mapping[str, Mapping[str, Any]]
    ) -> ReplicaStatus | None:
        """The cached status of an unchanged job; None if the job must be described."""
        name = handle.data["name"]
        version, status = self._seen.get(name, (None, None))
        return status if name in listed and version == _version(listed[name]) else None

    def _by_description(self, handle: ReplicaHandle) -> ReplicaStatus:
        region, name = handle.data["region"], handle.data["name"]
        try:
            job = self._jobs.describe(region, name)
            if job is None:
                self._seen.pop(name, None)
                message = f"SageMaker has no training job {name} in {region}"
                return ReplicaStatus(state=JobState.ENDED, cause=Cause.LOST, message=message)
            status = sagemaker_status.of_description(job)
            if sagemaker_status.must_be_stopped(job):
                self._jobs.stop(region, name)  # repeated at each poll until it is Stopping
            elif status.state is JobState.ENDED:
                self._seen.pop(name, None)
                self._jobs.forget_secret(region, name, job)
            else:
                self._seen[name] = (_version(job), status)
        except RetryLater as error:
            return ReplicaStatus(state=JobState.UNKNOWN, message=str(error))
        return status

    def _handle(self, launch_key: str, region: str, name: str) -> ReplicaHandle:
        data = {"region": region, "name": name}
        return ReplicaHandle(backend=self.backend, launch_key=launch_key, data=data)

    def _known_regions(self) -> tuple[str, ...]:
        if not self.regions:
            raise AccountError(
                "expected a region, in AWS_DEFAULT_REGION or in the option regions, found none"
            )
        return self.regions

    def _region(self, spec: ReplicaSpec) -> str:
        regions = self._known_regions()
        region = spec.region or regions[0]
        if region not in regions:
            raise LaunchRefused(
                f"region: expected one of {', '.join(regions)} (the option regions), "
                f"found {region!r}"
            )
        return region


def _version(job: Mapping[str, Any]) -> object:
    """A value that changes with the job; the same for its summary and its description."""
    return job.get("LastModifiedTime"), job.get("SecondaryStatus")
