"""Training jobs as processes, and their CloudWatch Logs.

Rules and sources (docs.aws.amazon.com/sagemaker/latest/...):

- A name is accepted once for each account and region, also after the job has ended:
  APIReference/API_CreateTrainingJob.html, TrainingJobName and ResourceInUse.
- Instances of jobs that are InProgress or Stopping count against the quota of their instance type,
  spot and on demand separately, and a job beyond it is refused with ResourceLimitExceeded:
  API_CreateTrainingJob.html, Errors; the quotas' names are those of Service Quotas; the message is
  one that users report (github.com/aws/amazon-sagemaker-examples/issues/1543). The quota is checked
  before the name, so a repeated request can be refused although its job exists.
- MaxWaitTimeInSeconds is required for spot jobs, only allowed for them, and at least
  MaxRuntimeInSeconds: API_StoppingCondition.html.
- A stopped job is Stopping while its container has 120 s after SIGTERM, then Stopped:
  API_StopTrainingJob.html. It stays Stopping for at least ``stopping_s`` here. A job that has ended
  or is Stopping cannot be stopped: ValidationException.
- An interrupted spot job stays InProgress and is restarted under the same name when there is a
  machine; one beyond its MaxWaitTime goes over Stopping to Stopped: dg/
  model-managed-spot-training-status.html.
- A job without a machine stays in Starting, with a message about capacity:
  APIReference/API_SecondaryStatusTransition.html, StatusMessage.
- Lists come in pages of at most 100, newest first; a token is valid for its own query only:
  API_ListTrainingJobs.html. With ``hold_lists`` they lag: the page does not promise
  that a list shows a job at once.

There is no background thread: a request updates a job to the state of its process.
"""

from __future__ import annotations

import base64
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.emulators.aws import AwsError
from tests.emulators.processes import Processes

GROUP = "/aws/sagemaker/TrainingJobs"
LONGEST_RUN_S = 432_000
SPOT_SHARE = 0.3
"""The billed fraction of a spot job's training time."""

_NO_MEMORY = (
    "ClientError: Please use an instance type with more memory, or reduce the size of job data "
    "processed on an instance., exit code: 137"
)
_NO_MACHINE = (
    "CapacityError: Unable to provision requested ML compute capacity. Please retry using a "
    "different ML instance type."
)
_RETRYING = "Insufficient capacity error from EC2 while launching instances, retrying!"
_INTERNAL = "InternalServerError: We encountered an internal error. Please try again."
_ENDED = ("Completed", "Failed", "Stopped")


@dataclass
class TrainingJob:
    request: Mapping[str, Any]
    region: str
    arn: str
    created_s: float
    status: str = "InProgress"
    changes: list[tuple[str, float, str]] = field(default_factory=list)
    reason: str = ""
    starts: list[str] = field(default_factory=list)
    streams: dict[str, str] = field(default_factory=dict)
    waiting: bool = True
    fault: str = ""
    stopping_since_s: float = 0.0
    stopping_as: str = "Stopped"

    @property
    def instance_type(self) -> str:
        return str(self.request["ResourceConfig"].get("InstanceType", ""))

    @property
    def instances(self) -> int:
        return int(self.request["ResourceConfig"].get("InstanceCount", 1))

    @property
    def name(self) -> str:
        return str(self.request["TrainingJobName"])

    @property
    def spot(self) -> bool:
        return bool(self.request.get("EnableManagedSpotTraining"))

    def change(self, stage: str, at_s: float, message: str = "") -> None:
        self.changes.append((stage, at_s, message))


class TrainingJobs:
    """All jobs of an account. ``environment`` returns the variables of a job's machine."""

    def __init__(
        self,
        processes: Processes,
        *,
        account: str,
        environment: Callable[[TrainingJob], Mapping[str, str]],
        limit: Callable[[str], float] = lambda quota: math.inf,
    ) -> None:
        """``limit`` returns the account's quota of a name, in instances."""
        self.limit = limit
        self.stopping_s = 0.1
        self.stopping_held = False
        self._listed: dict[str, Sequence[dict[str, Any]]] | None = None
        self.processes = processes
        self.account = account
        self.environment = environment
        self.capacity = True
        self.log_page = 10_000
        self.lock = threading.RLock()
        self._jobs: dict[tuple[str, str], TrainingJob] = {}
        self._used: set[tuple[str, str]] = set()

    # The API: each method takes a request's parameters and returns the response

    def create(self, region: str, given: Mapping[str, Any]) -> dict[str, Any]:
        stopping = given.get("StoppingCondition", {})
        run_s = stopping.get("MaxRuntimeInSeconds", 86_400)
        spot, wait_s = given.get("EnableManagedSpotTraining"), stopping.get("MaxWaitTimeInSeconds")
        if spot and (wait_s is None or wait_s < run_s):
            raise AwsError(
                "ValidationException",
                "Invalid MaxWaitTimeInSeconds. It must be present and be greater than or equal to "
                "MaxRuntimeInSeconds",
            )
        if wait_s is not None and not spot:
            raise AwsError(
                "ValidationException",
                "MaxWaitTimeInSeconds is only supported with EnableManagedSpotTraining",
            )
        if run_s > LONGEST_RUN_S:
            raise AwsError(
                "ResourceLimitExceeded",
                "The account-level service limit 'Longest run time for a training job' is "
                f"{LONGEST_RUN_S} Seconds, with current utilization of 0 Seconds and a request "
                f"delta of {run_s} Seconds. Please use AWS Service Quotas to request an increase "
                "for this quota.",
            )
        if f"::{self.account}:" not in given["RoleArn"]:
            raise AwsError(
                "ValidationException",
                f"Could not assume role {given['RoleArn']}. Please ensure that the role exists "
                "and allows principal 'sagemaker.amazonaws.com' to assume the role.",
            )
        with self.lock:
            self._check_quota(region, given)
            name = given["TrainingJobName"]
            arn = f"arn:aws:sagemaker:{region}:{self.account}:training-job/{name}"
            if (region, name) in self._used:
                raise AwsError(
                    "ResourceInUse",
                    "Training job names must be unique within an AWS account and region, and a "
                    f"training job with this name already exists ({arn})",
                )
            job = TrainingJob(request=given, region=region, arn=arn, created_s=time.time())
            job.change("Starting", job.created_s, "Launching requested ML instances")
            self._used.add((region, name))
            self._jobs[region, name] = job
            if self.capacity:
                self._train(job)
            else:
                job.change("Starting", job.created_s, _RETRYING)
        return {"TrainingJobArn": arn}

    def describe(self, region: str, given: Mapping[str, Any]) -> dict[str, Any]:
        with self.lock:
            job = self.get(region, given["TrainingJobName"])
            answer = {
                **{name: value for name, value in job.request.items() if name != "Tags"},
                **self._summary(job),
                "ModelArtifacts": {
                    "S3ModelArtifacts": f"{job.request['OutputDataConfig']['S3OutputPath']}/"
                    f"{job.name}/output/model.tar.gz"
                },
                "SecondaryStatusTransitions": [
                    {"Status": stage, "StartTime": at_s, "StatusMessage": message}
                    for stage, at_s, message in job.changes
                ],
            }
            if job.starts:
                answer["TrainingStartTime"] = self.processes.get(job.starts[0]).started_wall_s
            if job.status in _ENDED and job.starts:
                trained_s = sum(
                    process.ended_wall_s - process.started_wall_s
                    for process in map(self.processes.get, job.starts)
                )
                billed_s = trained_s * (SPOT_SHARE if job.spot else 1.0)
                answer["TrainingTimeInSeconds"] = math.ceil(trained_s)
                answer["BillableTimeInSeconds"] = math.ceil(billed_s)
            if job.reason:
                answer["FailureReason"] = job.reason
            return answer

    def list(self, region: str, given: Mapping[str, Any]) -> dict[str, Any]:
        with self.lock:
            held = self._listed
            summaries = self._summaries(region) if held is None else held.get(region, [])
        wanted, part = given.get("StatusEquals"), given.get("NameContains", "")
        jobs = [
            job
            for job in summaries
            if wanted in (None, job["TrainingJobStatus"]) and part in job["TrainingJobName"]
        ]
        jobs.sort(key=lambda job: float(job["CreationTime"]), reverse=True)
        question = f"{part}|{wanted}|"
        first, size = _first(given.get("NextToken"), question), given.get("MaxResults", 10)
        more = {"NextToken": _token(question, first + size)} if first + size < len(jobs) else {}
        return {"TrainingJobSummaries": jobs[first : first + size], **more}

    def _summaries(self, region: str) -> Sequence[dict[str, Any]]:
        return [
            self._summary(self._moved_on(job))
            for (where, _), job in self._jobs.items()
            if where == region
        ]

    def hold_lists(self, held: bool) -> None:
        """Freeze lists at their current content until ``held`` is False."""
        with self.lock:
            regions = {region for region, _ in self._jobs}
            self._listed = {name: self._summaries(name) for name in regions} if held else None

    def _check_quota(self, region: str, given: Mapping[str, Any]) -> None:
        wanted = TrainingJob(request=given, region=region, arn="", created_s=0.0)
        quota = f"{wanted.instance_type} for {'spot ' if wanted.spot else ''}training job usage"
        limit = self.limit(quota)
        used = sum(
            job.instances
            for (where, _), job in self._jobs.items()
            if where == region
            and (job.instance_type, job.spot) == (wanted.instance_type, wanted.spot)
            and self._moved_on(job).status not in _ENDED
        )
        if used + wanted.instances > limit:
            raise AwsError(
                "ResourceLimitExceeded",
                f"The account-level service limit '{quota}' is {limit:.0f} Instances, with current "
                f"utilization of {used} Instances and a request delta of {wanted.instances} "
                "Instances. Please use AWS Service Quotas to request an increase for this quota. "
                "If AWS Service Quotas is not available, contact AWS support to request an "
                "increase for this quota.",
            )

    def stop(self, region: str, given: Mapping[str, Any]) -> dict[str, Any]:
        with self.lock:
            job = self.get(region, given["TrainingJobName"])
            if job.status != "InProgress":
                raise AwsError(
                    "ValidationException",
                    f"The request was rejected because the training job is in status {job.status}.",
                )
            self._stop(job)
        return {}

    def _stop(self, job: TrainingJob, stage: str = "Stopped") -> None:
        job.status, job.stopping_since_s, job.stopping_as = "Stopping", time.time(), stage
        job.change("Stopping", job.stopping_since_s, "Stopping the training job")
        if self._runs(job):
            self.processes.kill(job.starts[-1])

    def tags(self, region: str, given: Mapping[str, Any]) -> dict[str, Any]:
        with self.lock:
            job = self.get(region, given["ResourceArn"].rpartition("/")[2])
            return {"Tags": job.request.get("Tags", [])}

    def log_streams(self, region: str, given: Mapping[str, Any]) -> dict[str, Any]:
        with self.lock:
            streams = self._streams(region)
            if given["logGroupName"] != GROUP or not streams:
                raise AwsError(
                    "ResourceNotFoundException", "The specified log group does not exist."
                )
            prefix = given.get("logStreamNamePrefix", "")
            names = sorted(name for name in streams if name.startswith(prefix))
            return {"logStreams": [{"logStreamName": name} for name in names]}

    def log_events(self, region: str, given: Mapping[str, Any]) -> dict[str, Any]:
        with self.lock:
            start = self._streams(region).get(given["logStreamName"])
            lines = self.processes.log_lines(start) if start else []
        if start is None:
            raise AwsError("ResourceNotFoundException", "The specified log stream does not exist.")
        token = given.get("nextToken")
        if token is not None and not token.startswith("f/"):
            raise AwsError("InvalidParameterException", "The specified nextToken is invalid.")
        first = int(token[2:]) if token else 0
        since_ms = given.get("startTime", 0) if token is None else 0
        events = [
            {"timestamp": int(at_s * 1000), "message": text, "ingestionTime": int(at_s * 1000)}
            for _, at_s, text in lines[first:]
        ]
        skipped = sum(int(at_s * 1000) < since_ms for _, at_s, _ in lines[first:])
        page = events[skipped : skipped + self.log_page]
        end = first + skipped + len(page)
        return {
            "events": page,
            "nextForwardToken": f"f/{end}",
            "nextBackwardToken": f"b/{first + skipped}",
        }

    # Faults and state changes

    def get(self, region: str, name: str) -> TrainingJob:
        """The current job. Raises the API's error for an unknown name."""
        job = self._jobs.get((region, name))
        if job is None:
            raise AwsError("ValidationException", "Requested resource not found.")
        return self._moved_on(job)

    def living(self) -> Sequence[TrainingJob]:
        """Jobs that have not ended."""
        with self.lock:
            return [job for job in self._jobs.values() if self._moved_on(job).status not in _ENDED]

    def named(self, text: str) -> TrainingJob:
        """A job by its name, or by the launch key at the end of its name."""
        with self.lock:
            for job in self._jobs.values():
                if job.name == text or job.name.endswith(f"--{text}"):
                    return self._moved_on(job)
        raise ValueError(f"expected the name of a training job, found {text!r}")

    def interrupt(self, job: TrainingJob) -> None:
        if not job.spot:
            raise ValueError(f"expected a spot job, found {job.name}: others are not interrupted")
        self.processes.kill(job.starts[-1], "preempted")

    def break_down(self, job: TrainingJob) -> None:
        """Lose the machine of a job that is not spot."""
        job.fault = _INTERNAL
        self.processes.kill(job.starts[-1], "preempted", grace_s=0)

    def kill_for_memory(self, job: TrainingJob) -> None:
        self.processes.kill(job.starts[-1], "oom", grace_s=0)

    def starve(self, job: TrainingJob) -> None:
        """Fail a job that waits for a machine."""
        self._finish(job, "Failed", "Failed", time.time(), _NO_MACHINE)

    def give_machines(self) -> None:
        """Start waiting jobs and restart interrupted ones."""
        with self.lock:
            self.capacity = True
            for job in self._jobs.values():
                if self._moved_on(job).status == "InProgress" and job.waiting:
                    if job.starts:
                        job.change("Starting", time.time(), "Launching requested ML instances")
                    self._train(job)

    def forget(self, job: TrainingJob) -> None:
        with self.lock:
            del self._jobs[job.region, job.name]
        for start in job.starts:
            self.processes.forget(start)

    def _train(self, job: TrainingJob) -> None:
        stopping = job.request.get("StoppingCondition", {})
        algorithm = job.request["AlgorithmSpecification"]
        command = [
            *algorithm.get("ContainerEntrypoint", ["train"]),
            *algorithm.get("ContainerArguments", []),
        ]
        start = f"{job.region}.{job.name}.{len(job.starts) + 1}"
        process = self.processes.start(
            command,
            {**self.environment(job), **job.request.get("Environment", {})},
            timeout_s=stopping.get("MaxRuntimeInSeconds", 86_400),
            job_id=start,
        )
        job.waiting = False
        job.starts.append(start)
        number = int(process.started_wall_s) + len(job.starts)
        job.streams[f"{job.name}/algo-1-{number}"] = start
        job.change("Downloading", process.started_wall_s, "Downloading the training image")
        job.change("Training", process.started_wall_s, "Training image download completed.")

    def _runs(self, job: TrainingJob) -> bool:
        return bool(job.starts) and self.processes.get(job.starts[-1]).state != "ended"

    def _moved_on(self, job: TrainingJob) -> TrainingJob:
        if job.status in _ENDED:
            return job
        wait_s = job.request.get("StoppingCondition", {}).get("MaxWaitTimeInSeconds")
        late = wait_s is not None and time.time() > job.created_s + wait_s
        if job.status == "InProgress" and late:
            self._stop(job, "MaxWaitTimeExceeded")
        if self._runs(job):
            return job
        if job.status == "Stopping":
            held = self.stopping_held or time.time() < job.stopping_since_s + self.stopping_s
            if not held:
                self._stopped(job)
        elif not job.waiting:
            self._ended(job)
        return job

    def _stopped(self, job: TrainingJob) -> None:
        """Complete the stop of a job without a process."""
        at_s = time.time()
        process = self.processes.get(job.starts[-1]) if job.starts else None
        if process is not None and process.ended_by == "oom":
            self._finish(job, "Failed", "Failed", at_s, _NO_MEMORY)
        else:
            self._finish(job, "Stopped", job.stopping_as, at_s)

    def _ended(self, job: TrainingJob) -> None:
        """Record the end of a process that was not stopped."""
        process = self.processes.get(job.starts[-1])
        at_s = process.ended_wall_s
        if job.fault:
            self._finish(job, "Failed", "Failed", at_s, job.fault)
        elif process.ended_by == "preempted":
            job.waiting = True
            job.change("Interrupted", at_s, "Training job interrupted")
        elif process.ended_by == "deadline":
            job.change("Stopping", at_s, "Stopping the training job")
            self._finish(job, "Stopped", "MaxRuntimeExceeded", at_s)
        elif process.ended_by == "oom":
            self._finish(job, "Failed", "Failed", at_s, _NO_MEMORY)
        elif process.exit_code == 0:
            job.change("Uploading", at_s, "Uploading generated training model")
            self._finish(job, "Completed", "Completed", at_s)
        else:
            reason = f"AlgorithmError: , exit code: {process.exit_code}"
            self._finish(job, "Failed", "Failed", at_s, reason)

    def _finish(
        self, job: TrainingJob, status: str, stage: str, at_s: float, reason: str = ""
    ) -> None:
        job.status, job.reason = status, reason
        job.change(stage, at_s, f"Training job {status.lower()}")

    def _summary(self, job: TrainingJob) -> dict[str, Any]:
        summary = {
            "TrainingJobName": job.name,
            "TrainingJobArn": job.arn,
            "CreationTime": job.created_s,
            "LastModifiedTime": job.changes[-1][1],
            "TrainingJobStatus": job.status,
            "SecondaryStatus": job.changes[-1][0],
        }
        if job.status in _ENDED:
            summary["TrainingEndTime"] = job.changes[-1][1]
        return summary

    def _streams(self, region: str) -> dict[str, str]:
        """Log streams with at least one line."""
        return {
            stream: start
            for (where, _), job in self._jobs.items()
            for stream, start in job.streams.items()
            if where == region and self.processes.log_lines(start)
        }


def _token(question: str, first: int) -> str:
    return base64.urlsafe_b64encode(f"{question}{first}".encode()).decode()


def _first(token: str | None, question: str) -> int:
    """The first index of the page of ``token``. Raises :class:`AwsError` for a token of another
    query."""
    if token is None:
        return 0
    try:
        text = base64.urlsafe_b64decode(token.encode()).decode()
    except ValueError:
        text = ""
    if not text.startswith(question) or not text.removeprefix(question).isdecimal():
        raise AwsError("ValidationException", "Invalid NextToken")
    return int(text.removeprefix(question))
