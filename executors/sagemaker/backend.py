"""The backend ``sagemaker``: Amazon SageMaker training jobs."""

from __future__ import annotations

from executors.backend import AWS_KEYS, Backend
from executors.sagemaker.hardware import TABLE
from executors.sagemaker.options import Options

BACKEND = Backend(
    name="sagemaker",
    label="Amazon SageMaker",
    executor="executors.sagemaker.executor:SageMakerExecutor",
    hardware=TABLE,
    options=Options,
    variables=AWS_KEYS,
    public_variables=frozenset({"AWS_DEFAULT_REGION"}),
    console_url="https://{region}.console.aws.amazon.com/sagemaker/home?region={region}#/jobs/{name}",
    role_stores=frozenset({"s3"}),
    demo_hardware="ml.m5.large",
)
