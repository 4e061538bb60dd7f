"""Create one training job, after its secret.

The secret comes first because the job can start at once. If CreateTrainingJob refuses the request,
the secret is deleted again; if its response is lost, the secret stays, because the job can exist.
The default quota is one CreateTrainingJob per second, so throttled requests are retried here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from botocore.exceptions import ClientError

from executors import launching
from executors.base import ExecutorConfig, JobRequest, LaunchRefused, NoCapacity
from executors.sagemaker import secrets as sagemaker_secrets
from executors.sagemaker import status
from executors.sagemaker.client import BUSY, Clients, aws_errors, code_of
from executors.sagemaker.jobs import Jobs
from executors.sagemaker.options import Options
from executors.sagemaker.request import create_request, job_name

THROTTLED_S = 20.0
"""Time for which a throttled launch is retried before the error is raised."""

DESCRIBE_RETRIES = 3
"""Retries, a second apart, for describing a job whose name is in use but that is not found."""


class Launcher:
    """Creates training jobs. Thread-safe, like its clients."""

    def __init__(self, clients: Clients, jobs: Jobs, config: ExecutorConfig) -> None:
        self._clients = clients
        self._jobs = jobs
        self._config = config
        self._sleep = time.sleep

    def start(
        self,
        job: JobRequest,
        options: Options,
        *,
        region: str,
        command: Sequence[str],
        output: str,
    ) -> str:
        """Create the job unless it exists. Returns its name."""
        spec, secrets = job.spec, job.secrets
        name = job_name(self._config.deployment, spec.launch_key)
        tags = launching.labels_of(self._config, spec)
        request = create_request(
            spec,
            options,
            name=name,
            command=sagemaker_secrets.with_secrets(command, python=options.python)
            if secrets
            else command,
            env=_with_region(job.env, secrets, region),
            tags=tags,
            output=output,
        )
        if secrets:
            request["Environment"][sagemaker_secrets.ARN_VARIABLE] = sagemaker_secrets.put(
                self._clients.get("secretsmanager", region),
                name,
                secrets,
                tags=tags,
                kms_key_id=options.kms_key_id,
            )
        try:
            if not self._create(region, request):
                self._check_existing(region, name)
        except (LaunchRefused, NoCapacity) as error:
            # An earlier request whose response was lost can have created the job, which then uses
            # the quota: its secret must stay.
            if self._jobs.describe(region, name) is not None:
                return name
            if secrets and isinstance(error, LaunchRefused):
                self._jobs.forget_secret(region, name)
            raise
        return name

    def _create(self, region: str, request: Mapping[str, Any]) -> bool:
        """Create the job. Returns False if a job of that name exists."""
        client = self._clients.get("sagemaker", region)
        until = time.monotonic() + THROTTLED_S
        while True:
            with aws_errors():
                try:
                    client.create_training_job(**request)
                    return True
                except ClientError as error:
                    if code_of(error) == "ResourceInUse":
                        return False
                    if code_of(error) not in BUSY or time.monotonic() > until:
                        raise
            self._sleep(random.uniform(0.5, 2.0))

    def _check_existing(self, region: str, name: str) -> None:
        job = self._jobs.describe(region, name)
        for _ in range(DESCRIBE_RETRIES):
            if job is not None:
                break
            self._sleep(1.0)
            job = self._jobs.describe(region, name)
        if job is None:
            raise LaunchRefused(
                f"{name}: the training job of this name in {region} was deleted, and SageMaker "
                "takes a name only once"
            )
        if job["TrainingJobStatus"] in status.ENDED:
            self._jobs.forget_secret(region, name)  # this launch stored it again


def _with_region(env: Mapping[str, str], secrets: Mapping[str, str], region: str) -> dict[str, str]:
    """Add AWS_DEFAULT_REGION: SageMaker sets AWS_REGION, which not every client reads."""
    if {"AWS_REGION", "AWS_DEFAULT_REGION"} & {*env, *secrets}:
        return dict(env)
    return {"AWS_DEFAULT_REGION": region, **env}
