"""Replicas as Amazon SageMaker training jobs of one instance each, through boto3.

A job's name is its launch key behind the deployment's (:func:`sagemaker_request.job_name`). Account
and region accept a name once and for ever, so a launch that is repeated meets ``ResourceInUse`` and
finds its job, and the jobs of a deployment are listed by how their names begin. Names are a
region's own: jobs are looked for in the regions of the option ``regions``, by default the SDK's.

The image's own ``train`` program is not used: the job runs our command. It reads and writes the
rendezvous by its execution role; other secrets travel as :mod:`executors.sagemaker.secrets` says.

:meth:`SageMakerExecutor.poll` asks for the list of jobs in progress, a hundred a page, and
describes only what is not on it, is new, or has changed since. That is all an executor remembers. A
managed spot job that was interrupted is stopped, for the reason that
:mod:`executors.sagemaker.status` gives.

Options: :class:`executors.sagemaker.request.Options`. Credentials: ``AWS_ACCESS_KEY_ID``,
``AWS_SECRET_ACCESS_KEY``, ``AWS_SESSION_TOKEN``, ``AWS_DEFAULT_REGION``, ``AWS_ENDPOINT_URL_*``.
Left out: jobs of several instances, warm pools, SageMaker's own checkpoints and metrics.
API: docs.aws.amazon.com/sagemaker/latest/APIReference/ (CreateTrainingJob, DescribeTrainingJob,
ListTrainingJobs, StopTrainingJob, ListTags).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from executors import launching
from executors.base import (
    Capabilities,
    Cause,
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
from executors.sagemaker import preflight as sagemaker_preflight
from executors.sagemaker import status as sagemaker_status
from executors.sagemaker.client import Clients
from executors.sagemaker.jobs import Jobs
from executors.sagemaker.launch import Launcher
from executors.sagemaker.logs import Tail
from executors.sagemaker.request import Options, job_name, output_path

AT_ONCE = 8


class SageMakerExecutor(launching.LaunchReplicas):
    """Training jobs of one AWS account."""

    backend = "sagemaker"

    def __init__(self, config: ExecutorConfig) -> None:
        self.config = config
        try:
            self.options = Options.read(config.options)
        except ValueError as error:
            raise NeedsPerson(str(error)) from error
        self._clients = Clients(config.credentials, answer_s=self.options.answer_s)
        self._jobs = Jobs(self._clients, config.deployment)
        self._launcher = Launcher(self._clients, self._jobs, config)
        own = self._clients.default_region()
        self.regions = self.options.regions or ((own,) if own else ())
        self.capabilities = Capabilities(
            max_lifetime_s=self.options.max_runtime_s, spot=True, regions=self.regions
        )
        self._seen: dict[str, tuple[object, ReplicaStatus]] = {}

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
            options, region = self._options(spec), self._region(spec)
            plain, hidden = request.environment(spec, env=env, secrets=secrets)
            command = bootstrap.packed_command(
                entrypoint, request.args, python=options.python, code=code
            )
            name = self._launcher.start(
                spec,
                options,
                region=region,
                command=command,
                env=plain,
                secrets=hidden,
                output=output_path(options, code),
            )
            return self._handle(spec.launch_key, region, name)

        return launching.launch_each(start, request.specs)

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """Also stops a spot job that was interrupted. Raises :class:`RetryLater` where AWS cannot
        be reached."""
        regions = {handle.data["region"] for handle in handles}
        listed = {region: self._jobs.of_status(region, "InProgress") for region in regions}
        statuses = [self._by_list(handle, listed[handle.data["region"]]) for handle in handles]
        left = [n for n, status in enumerate(statuses) if status is None]
        if left:
            with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="describe") as pool:
                described = list(pool.map(self._by_description, [handles[n] for n in left]))
            for n, status in zip(left, described, strict=True):
                statuses[n] = status
        return [status for status in statuses if status is not None]

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
        while follow and not self._jobs.is_over(region, name):
            yield from tail.lines()
            time.sleep(self.options.poll_s)
        yield from tail.lines()
        if follow:  # the last lines come some time after the end is told
            time.sleep(self.options.poll_s)
            yield from tail.lines()

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        """SageMaker sends SIGTERM, and SIGKILL two minutes later. All are asked, whatever fails."""
        if not handles:
            return
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="stop") as pool:
            asked = [
                pool.submit(self._jobs.stop, h.data["region"], h.data["name"]) for h in handles
            ]
        for request in asked:
            request.result()

    def collect(self, handles: Sequence[ReplicaHandle], timeout: float) -> list[ReplicaStatus]:
        return launching.collect(self.poll, handles, timeout, every_s=self.options.poll_s)

    def check(self) -> str:
        regions = self._known_regions()
        [(account, arn), *_] = [sagemaker_preflight.who(self._clients, where) for where in regions]
        return f"AWS account {account} as {arn}, in {', '.join(regions)}"

    def preflight(self, spec: ReplicaSpec, count: int) -> list[Problem]:
        try:
            region = self._region(spec)
        except LaunchRefused as error:
            field = "credential" if isinstance(error, NeedsPerson) else "region"
            return [Problem(field=field, message=str(error))]
        try:
            options = self._options(spec)
        except LaunchRefused as error:
            return [Problem(field="options", message=str(error))]
        return sagemaker_preflight.problems(self._clients, options, spec, count, region=region)

    def _by_list(
        self, handle: ReplicaHandle, listed: Mapping[str, Mapping[str, Any]]
    ) -> ReplicaStatus | None:
        """None where the job must be described."""
        name = handle.data["name"]
        version, status = self._seen.get(name, (None, None))
        return status if name in listed and version == _version(listed[name]) else None

    def _by_description(self, handle: ReplicaHandle) -> ReplicaStatus:
        region, name = handle.data["region"], handle.data["name"]
        try:
            job = self._jobs.describe(region, name)
            if job is None:
                self._seen.pop(name, None)
                message = f"SageMaker knows no training job {name} in {region}"
                return ReplicaStatus(state=JobState.ENDED, cause=Cause.LOST, message=message)
            status = sagemaker_status.of_description(job)
            if sagemaker_status.must_be_stopped(job):
                self._jobs.stop(region, name)  # asked again at each poll until it is Stopping
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

    def _options(self, spec: ReplicaSpec) -> Options:
        try:
            return self.options.of(spec)
        except ValueError as error:
            raise LaunchRefused(str(error)) from error

    def _known_regions(self) -> tuple[str, ...]:
        if not self.regions:
            raise NeedsPerson(
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
    """Changes with the job; of its summary and of its description."""
    return job.get("LastModifiedTime"), job.get("SecondaryStatus")
