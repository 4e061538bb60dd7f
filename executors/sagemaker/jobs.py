"""Training jobs of one deployment as SageMaker knows them: describe, list, stop, and their secrets.

One that does not exist is None, and to stop one that has ended is no error; everything else that
AWS says is raised as one of ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

from botocore.exceptions import ClientError

from executors import launching
from executors.base import ExecutorError, JobState
from executors.sagemaker import secrets
from executors.sagemaker import status as sagemaker_status
from executors.sagemaker.client import Clients, aws_errors, is_unknown, message_of
from executors.sagemaker.request import key_of, name_prefix

_HAS_ENDED = "The request was rejected because the training job is in status"


class Jobs:
    """For many threads, like the clients it uses."""

    def __init__(self, clients: Clients, deployment: str) -> None:
        self._clients = clients
        self._deployment = deployment
        self.left_behind_s = secrets.LEFT_BEHIND_S

    def describe(self, region: str, name: str) -> Mapping[str, Any] | None:
        client = self._clients.get("sagemaker", region)
        with aws_errors():
            try:
                job: Mapping[str, Any] = client.describe_training_job(TrainingJobName=name)
            except ClientError as error:
                if is_unknown(error):
                    return None
                raise
        return job

    def is_over(self, region: str, name: str) -> bool:
        job = self.describe(region, name)
        return job is None or sagemaker_status.of_description(job).state is JobState.ENDED

    def of_status(self, region: str, status: str) -> dict[str, Mapping[str, Any]]:
        """Name -> summary, of our jobs in that state."""
        client = self._clients.get("sagemaker", region)
        prefix = name_prefix(self._deployment)
        with aws_errors():
            pages = client.get_paginator("list_training_jobs").paginate(
                NameContains=prefix, StatusEquals=status, PaginationConfig={"PageSize": 100}
            )
            found = [summary for page in pages for summary in page["TrainingJobSummaries"]]
        named = {str(summary["TrainingJobName"]): summary for summary in found}
        return {name: summary for name, summary in named.items() if name.startswith(prefix)}

    def launch_key(self, region: str, summary: Mapping[str, Any]) -> str:
        """By the name, or by the tag where the name had to be cut."""
        name = str(summary["TrainingJobName"])
        key = key_of(self._deployment, name)
        if key is None:
            with aws_errors():
                pages = self._clients.get("sagemaker", region).get_paginator("list_tags")
                answers = pages.paginate(ResourceArn=summary["TrainingJobArn"])
                tags = {tag["Key"]: tag["Value"] for page in answers for tag in page["Tags"]}
            key = str(tags.get(launching.KEY_LABEL, name))
        return key

    def stop(self, region: str, name: str) -> None:
        with aws_errors():
            try:
                self._clients.get("sagemaker", region).stop_training_job(TrainingJobName=name)
            except ClientError as error:
                if not is_unknown(error) and not message_of(error).startswith(_HAS_ENDED):
                    raise

    def forget_secret(self, region: str, name: str, job: Mapping[str, Any] | None = None) -> None:
        """Delete the job's secret, unless ``job`` says that it has none. What fails now,
        :meth:`sweep` does later: a poll is not to fail of it."""
        if job is not None and secrets.ARN_VARIABLE not in job.get("Environment", {}):
            return
        with contextlib.suppress(ExecutorError):
            secrets.delete(self._clients.get("secretsmanager", region), name)

    def sweep(self, region: str, live: Collection[str]) -> None:
        """Delete the secrets of jobs that are over; nothing where the account may not list them."""
        with contextlib.suppress(ExecutorError):
            secrets.sweep(
                self._clients.get("secretsmanager", region),
                self._deployment,
                is_over=lambda name: name not in live and self.is_over(region, name),
                older_than_s=self.left_behind_s,
            )
