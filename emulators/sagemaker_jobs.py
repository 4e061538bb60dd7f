"""Training jobs that really run, and what CloudWatch Logs has of them.

A job goes the ways of SageMaker's developer guide ("Managed Spot Training Lifecycle") and ends with
the reasons SageMaker gives. Nothing runs in the background: whoever asks for a
job moves it on to where its process is. Like SageMaker it takes a name once and never again, and
starts an interrupted spot job anew when there is a machine.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from emulators.aws import AwsError
from emulators.processes import Processes

GROUP = "/aws/sagemaker/TrainingJobs"
LONGEST_RUN_S = 432_000
SPOT_SHARE = 0.3
"""Of the seconds a spot job trains, how many are billed."""

_NO_MEMORY = (
    "ClientError: Please use an instance type with more memory, or reduce the size of job data "
    "processed on an instance., exit code: 137"
)
_NO_MACHINE = (
    "CapacityError: Unable to provision requested ML compute capacity. Please retry using a "
    "different ML instance type."
)
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

    @property
    def name(self) -> str:
        return str(self.request["TrainingJobName"])

    @property
    def spot(self) -> bool:
        return bool(self.request.get("EnableManagedSpotTraining"))

    def change(self, stage: str, at_s: float, message: str = "") -> None:
        self.changes.append((stage, at_s, message))


class TrainingJobs:
    """All jobs of an account. ``environment`` says what a job's machine adds to its own."""

    def __init__(
        self,
        processes: Processes,
        *,
        account: str,
        environment: Callable[[TrainingJob], Mapping[str, str]],
    ) -> None:
        self.processes = processes
        self.account = account
        self.environment = environment
        self.capacity = True
        self.log_page = 10_000
        self.lock = threading.RLock()
        self._jobs: dict[tuple[str, str], TrainingJob] = {}
        self._used: set[tuple[str, str]] = set()

    # What the API does. Each takes a request's parameters and gives its answer.

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
        return {"TrainingJobArn": arn}

    def describe(self, region: str, given: Mapping[str, Any]) -> dict[str, Any]:
        with self.lock:
            job = self.get(region, given["TrainingJobName"])
            answer = {
                **{name: value for name, value in job.request.items() if name != "Tags"},
                **self._summary(job),
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
            found = [
                self._summary(self._moved_on(job))
                for (where, name), job in self._jobs.items()
                if where == region and given.get("NameContains", "") in name
            ]
        wanted = given.get("StatusEquals")
        found = [job for job in found if wanted in (None, job["TrainingJobStatus"])]
        found.sort(key=lambda job: float(job["CreationTime"]), reverse=True)
        first, size = int(given.get("NextToken", 0)), given.get("MaxResults", 10)
        more = {"NextToken": str(first + size)} if first + size < len(found) else {}
        return {"TrainingJobSummaries": found[first : first + size], **more}

    def stop(self, region: str, given: Mapping[str, Any]) -> dict[str, Any]:
        with self.lock:
            job = self.get(region, given["TrainingJobName"])
            if job.status != "InProgress":
                raise AwsError(
                    "ValidationException",
                    f"The request was rejected because the training job is in status {job.status}.",
                )
            job.status = "Stopping"
            job.change("Stopping", time.time(), "Stopping the training job")
            if self._runs(job):
                self.processes.kill(job.starts[-1])
            self._moved_on(job)
        return {}

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

    # What goes wrong, and what goes on.

    def get(self, region: str, name: str) -> TrainingJob:
        """Where it is now. Raises what the API says of one it does not know."""
        job = self._jobs.get((region, name))
        if job is None:
            raise AwsError("ValidationException", "Requested resource not found.")
        return self._moved_on(job)

    def named(self, text: str) -> TrainingJob:
        """By its whole name, or by the launch key that is the end of it."""
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
        """SageMaker loses the machine of a job that is not spot."""
        job.fault = _INTERNAL
        self.processes.kill(job.starts[-1], "preempted", grace_s=0)

    def kill_for_memory(self, job: TrainingJob) -> None:
        self.processes.kill(job.starts[-1], "oom", grace_s=0)

    def starve(self, job: TrainingJob) -> None:
        """A job that waits for a machine is told that there is none."""
        self._finish(job, "Failed", "Failed", time.time(), _NO_MACHINE)

    def give_machines(self) -> None:
        """Jobs that wait start, interrupted ones again."""
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
        if job.status in _ENDED or self._runs(job):
            return job
        wait_s = job.request.get("StoppingCondition", {}).get("MaxWaitTimeInSeconds")
        if not job.waiting:
            self._ended(job)
        elif job.status == "Stopping":
            self._finish(job, "Stopped", "Stopped", time.time())
        elif wait_s is not None and time.time() > job.created_s + wait_s:
            self._finish(job, "Stopped", "MaxWaitTimeExceeded", time.time())
        return job

    def _ended(self, job: TrainingJob) -> None:
        process = self.processes.get(job.starts[-1])
        at_s = process.ended_wall_s
        if job.fault:
            self._finish(job, "Failed", "Failed", at_s, job.fault)
        elif process.ended_by == "preempted" and job.status == "InProgress":
            job.waiting = True
            job.change("Interrupted", at_s, "Training job interrupted")
        elif process.ended_by == "deadline":
            self._finish(job, "Stopped", "MaxRuntimeExceeded", at_s)
        elif process.ended_by == "oom":
            self._finish(job, "Failed", "Failed", at_s, _NO_MEMORY)
        elif job.status == "Stopping":
            self._finish(job, "Stopped", "Stopped", at_s)
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
        """Those that something was written to."""
        return {
            stream: start
            for (where, _), job in self._jobs.items()
            for stream, start in job.streams.items()
            if where == region and self.processes.log_lines(start)
        }
