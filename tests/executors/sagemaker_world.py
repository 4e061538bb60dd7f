"""SageMaker for tests: the real boto3 against :mod:`emulators.sagemaker`."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Self

from emulators.sagemaker import ACCESS_KEY, ACCOUNT, ROLE, SECRET_KEY, SageMakerServer
from executors.base import ReplicaHandle
from executors.sagemaker import SageMakerExecutor
from tests.executors.worlds import config

REGION = "us-east-1"
OPTIONS = {
    "role_arn": ROLE,
    "image": f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/archipelago-replica:1",
    "output_path": "s3://archipelago/output",
}
GRACE_S = 0.5


class SageMakerWorld:
    backend = "sagemaker"
    wrong_credentials = {  # noqa: RUF012
        "AWS_ACCESS_KEY_ID": "AKIANOBODYSKEY",
        "AWS_SECRET_ACCESS_KEY": "nobodys-secret-key",
    }

    def __init__(self, folder: Path) -> None:
        self.server = SageMakerServer(folder, grace_s=GRACE_S)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self.server)
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
        ours = {**OPTIONS, "poll_s": 0.02}
        return SageMakerExecutor(config(credentials=given, **{**ours, **options}))

    def impatient(self) -> SageMakerExecutor:
        return self.executor(answer_s=1.0)

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

    def requests(self) -> int:
        return self.server.requests
