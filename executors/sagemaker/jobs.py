"""The training jobs of one deployment: describe, list and stop them, and delete their secrets.

An unknown job is None, and stopping an ended job is no error. All other errors of AWS are raised as
errors of :mod:`executors.base`.
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
    """Thread-safe, like its clients."""

    def __init__(self, clients: Clients, deployment: str) -> None:
        self._clients = clients
        self._deployment = deployment
        self.stale_s = secrets.STALE_S

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

    def has_ended(self, region: str, name: str) -> bool:
        job = self.describe(region, name)
        return job is None or sagemaker_status.of_description(job).state is JobState.ENDED

    def of_status(self, region: str, status: str) -> dict[str, Mapping[str, Any]]:
        """Summaries of the deployment's jobs of that status, by name."""
        client = self._clients.get("sagemaker", region)
        prefix = name_prefix(self._deployment)
        with aws_errors():
            pages = client.get_paginator("list_training_jobs").paginate(
                NameContains=prefix, StatusEquals=status, PaginationConfig={"PageSize": 100}
            )
            summaries = [summary for page in pages for summary in page["TrainingJobSummaries"]]
        named = {str(summary["TrainingJobName"]): summary for summary in summaries}
        return {name: summary for name, summary in named.items() if name.startswith(prefix)}

    def launch_key(self, region: str, summary: Mapping[str, Any]) -> str:
        """The launch key from the name, or from the tag where the name was truncated."""
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
        """Delete the job's secret, unless ``job`` shows that it has none.

        Errors are ignored, because a poll must not fail; :meth:`sweep` tries again.
        """
        if job is not None and secrets.ARN_VARIABLE not in job.get("Environment", {}):
            return
        with contextlib.suppress(ExecutorError):
            secrets.delete(self._clients.get("secretsmanager", region), name)

    def sweep(self, region: str, live: Collection[str]) -> None:
        """Delete the secrets of ended jobs. Does nothing without the permission to list secrets."""
        with contextlib.suppress(ExecutorError):
            secrets.sweep(
                self._clients.get("secretsmanager", region),
                self._deployment,
                has_ended=lambda name: name not in live and self.has_ended(region, name),
                older_than_s=self.stale_s,
            )
