"""SageMaker: the real boto3 against :mod:`tests.emulators.sagemaker`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self
from unittest import mock

from botocore.retries.standard import ExponentialBackoff

from executors.base import ReplicaHandle
from executors.sagemaker.executor import SageMakerExecutor
from executors.sagemaker.secrets import ARN_VARIABLE, secret_name
from tests.emulators.interruptions import Interruption
from tests.emulators.sagemaker import ACCESS_KEY, ACCOUNT, ROLE, SECRET_KEY, SageMakerServer
from tests.executors.harnesses import LIMIT_S, config

REGION = "us-east-1"
OPTIONS = {
    "role_arn": ROLE,
    "image": f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/archipelago-replica:1",
    "output_path": "s3://archipelago/output",
}
GRACE_S = 0.5


class SageMakerHarness:
    backend = "sagemaker"
    missing: Mapping[str, str] = {}
    wrong_credentials = {  # noqa: RUF012
        "AWS_ACCESS_KEY_ID": "AKIAUNKNOWNKEY",
        "AWS_SECRET_ACCESS_KEY": "nobodys-secret-key",
    }

    def __init__(self, folder: Path) -> None:
        self.server = SageMakerServer(folder, grace_s=GRACE_S)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self.server)
        # Repeated requests of boto3 are up to three seconds apart.
        self._stack.enter_context(
            mock.patch.object(ExponentialBackoff, "delay_amount", lambda *context: 0.01)
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def executor(self, **options: Any) -> SageMakerExecutor:
        given = {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL": self.server.url,
            **options.pop("credentials", {}),
        }
        ours = {**OPTIONS, "poll_s": 0.02, "answer_s": LIMIT_S}
        return SageMakerExecutor(config(credentials=given, **{**ours, **options}))

    def impatient(self) -> SageMakerExecutor:
        return self.executor(answer_s=0.3)

    def description(self, handle: ReplicaHandle) -> str:
        where = {"TrainingJobName": handle.data["name"]}
        job = self.server.jobs.describe(handle.data["region"], where)
        tags = self.server.jobs.tags(handle.data["region"], {"ResourceArn": job["TrainingJobArn"]})
        return json.dumps([job, tags])

    def preempt(self, handle: ReplicaHandle) -> None:
        self.server.preempt(handle.data["name"])

    def oom(self, handle: ReplicaHandle) -> None:
        self.server.oom(handle.data["name"])

    def lose(self, handle: ReplicaHandle) -> None:
        self.server.lose(handle.data["name"])

    def stop(self) -> None:
        self.server.stop()

    def start(self) -> None:
        self.server.start()

    def slow(self, seconds: float) -> None:
        self.server.slow(seconds)

    def refuse_quota(self, message: str | None) -> None:
        self.server.refuse_quota(message)

    def interrupt(self, at: int, how: Interruption) -> None:
        self.server.faults.interruptions.interrupt(at, how)

    def restore(self) -> int:
        return self.server.faults.interruptions.restore()

    def incomplete(self) -> list[str]:
        """Jobs whose environment names a secret that does not exist."""
        kept = {secret["ARN"] for secret in self.server.secrets.kept.values()}
        with self.server.jobs.lock:
            return [
                job.name
                for job in self.server.jobs.living()
                if job.request["Environment"].get(ARN_VARIABLE, "") not in ("", *kept)
            ]

    def left_behind(self) -> list[str]:
        """Secrets that a sweep left although their job had ended before it, or never existed."""
        with self.server.jobs.lock:
            living = {secret_name(job.name) for job in self.server.jobs.living()}
        executor = self.executor()
        executor._jobs.stale_s = 0.0
        executor.live()
        return [name for _, name in self.server.secrets.kept if name not in living]

    def requests(self) -> int:
        return self.server.requests


HARNESS = SageMakerHarness
