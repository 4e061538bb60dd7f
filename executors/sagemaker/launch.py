"""Starts one training job, and its secret before it.

In that order, because the job may start at once; so where CreateTrainingJob refuses the secret is
deleted again, and where its answer was lost it stays: the job may be there. By default an account
may create one training job a second, so being throttled is waited out here for a while.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from botocore.exceptions import ClientError

from executors import launching
from executors.base import ExecutorConfig, LaunchRefused, NoCapacity, ReplicaSpec
from executors.sagemaker import secrets as sagemaker_secrets
from executors.sagemaker import status
from executors.sagemaker.client import BUSY, Clients, aws_errors, code_of
from executors.sagemaker.jobs import Jobs
from executors.sagemaker.request import Options, create_request, job_name

THROTTLED_S = 20.0
"""How long a launch that is throttled is tried; then it is for its caller to come back."""

DESCRIBED_LATER = 3
"""How often, a second apart, a job whose name is in use is described again if it is not shown."""


class Launcher:
    """For many threads, like the clients it uses."""

    def __init__(
        self,
        clients: Clients,
        jobs: Jobs,
        config: ExecutorConfig,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clients = clients
        self._jobs = jobs
        self._config = config
        self._sleep = sleep
        self._clock = clock

    def start(
        self,
        spec: ReplicaSpec,
        options: Options,
        *,
        region: str,
        command: Sequence[str],
        env: Mapping[str, str],
        secrets: Mapping[str, str],
        output: str,
    ) -> str:
        """The name of the job, which may have been launched before."""
        name = job_name(self._config.deployment, spec.launch_key)
        tags = launching.labels_of(self._config, spec)
        request = create_request(
            spec,
            options,
            name=name,
            command=sagemaker_secrets.with_secrets(command, python=options.python)
            if secrets
            else command,
            env=_with_region(env, secrets, region),
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
            if not self._create(region, request, secrets):
                self._launched_before(region, name)
        except (LaunchRefused, NoCapacity) as error:
            # An earlier request, whose answer was lost, can have created the job that now uses up
            # the quota: its secret must stay.
            if self._jobs.describe(region, name) is not None:
                return name
            if secrets and isinstance(error, LaunchRefused):
                self._jobs.forget_secret(region, name)
            raise
        return name

    def _create(self, region: str, request: Mapping[str, Any], secrets: Mapping[str, str]) -> bool:
        """False where there was such a job before."""
        client = self._clients.get("sagemaker", region)
        until = self._clock() + THROTTLED_S
        while True:
            with aws_errors(secrets.values()):
                try:
                    client.create_training_job(**request)
                    return True
                except ClientError as error:
                    if code_of(error) == "ResourceInUse":
                        return False
                    if code_of(error) not in BUSY or self._clock() > until:
                        raise
            self._sleep(random.uniform(0.5, 2.0))

    def _launched_before(self, region: str, name: str) -> None:
        job = self._jobs.describe(region, name)
        for _ in range(DESCRIBED_LATER):
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
            self._jobs.forget_secret(region, name)  # stored again just now


def _with_region(env: Mapping[str, str], secrets: Mapping[str, str], region: str) -> dict[str, str]:
    """SageMaker sets AWS_REGION, which not every client reads."""
    if {"AWS_REGION", "AWS_DEFAULT_REGION"} & {*env, *secrets}:
        return dict(env)
    return {"AWS_DEFAULT_REGION": region, **env}
