"""The name of a training job and its CreateTrainingJob request. Pure functions.

The limits are those of the API
(docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html,
API_AlgorithmSpecification.html).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from executors import launching
from executors import options as declared
from executors.base import CodeRef, LaunchRefused, ReplicaSpec
from executors.sagemaker.options import Options

NAME_CHARS = 63
MAX_ITEMS = 100
MAX_CHARS = 256
"""Limits of ContainerEntrypoint and ContainerArguments: items, and characters per item."""

CPU = "ml.m5.large"
"""The instance type of the default hardware ``cpu``."""

ROLE = re.compile(r"arn:aws[a-z-]*:iam::(\d{12}):role/?[a-zA-Z_0-9+=,.@\-_/]+")
IMAGE = re.compile(
    r"\d{12}\.dkr\.ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?"
    r"/[a-z0-9._/-]+(?::[\w][\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)


def options_of(options: Options, spec: ReplicaSpec) -> Options:
    """The options of one job. Raises :class:`LaunchRefused`."""
    given = {name: getattr(options, name) for name in declared.options_of(Options)}
    return launching.job_options(Options, given, spec.options)


def name_prefix(deployment: str) -> str:
    """Prefix of the names of all jobs of a deployment, and of no other deployment's.

    It ends with the first ``--`` of the name.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", deployment.lower()).strip("-")[:24].strip("-")
    if plain != deployment or not plain:
        plain = f"{plain}-{_digest(deployment)}".lstrip("-")
    return f"{plain}--"


def job_name(deployment: str, launch_key: str) -> str:
    """The name of a key's job, unique in its account and region for all time.

    A long key is truncated and a digest appended after a capital ``X``. Keys have no capitals, so
    a name without ``X`` contains its whole key (:func:`key_of`).
    """
    prefix = name_prefix(deployment)
    name = prefix + launch_key
    if len(name) <= NAME_CHARS:
        return name
    digest = _digest(launch_key)
    room = NAME_CHARS - len(prefix) - len(digest) - 2
    return f"{prefix}{launch_key[:room].strip('-')}-X{digest}"


def key_of(deployment: str, name: str) -> str | None:
    """The launch key in the name of a job; None if the name was truncated."""
    return None if "X" in name else name.removeprefix(name_prefix(deployment))


def instance_type(spec: ReplicaSpec) -> str:
    return CPU if spec.hardware == "cpu" else spec.hardware


def deadline_s(spec: ReplicaSpec, options: Options) -> int:
    return math.ceil(options.max_runtime_s if spec.timeout_s is None else spec.timeout_s)


def output_path(options: Options, code: CodeRef | None) -> str:
    if not options.output_path and code is not None and code.uri.startswith("s3://"):
        return f"{code.uri.rstrip('/')}/sagemaker"
    return options.output_path


def create_request(
    spec: ReplicaSpec,
    options: Options,
    *,
    name: str,
    command: Sequence[str],
    env: Mapping[str, str],
    tags: Mapping[str, str],
    output: str,
) -> dict[str, Any]:
    """Arguments of ``create_training_job``.

    Raises :class:`LaunchRefused` for values that AWS refuses with a less clear message.
    """
    needed = {
        "role_arn": options.role_arn,
        "image": spec.image or options.image,
        "output_path": output,
    }
    missing = [option for option, value in needed.items() if not value]
    if missing:
        raise LaunchRefused(f"SageMaker options: expected {', '.join(missing)}, found none")
    run_s = deadline_s(spec, options)
    entrypoint, arguments = split_command(command)
    stopping = {"MaxRuntimeInSeconds": run_s}
    if spec.spot:
        stopping["MaxWaitTimeInSeconds"] = run_s + options.spot_wait_s
    request: dict[str, Any] = {
        "TrainingJobName": name,
        "AlgorithmSpecification": {
            "TrainingImage": needed["image"],
            "TrainingInputMode": "File",
            "ContainerEntrypoint": entrypoint,
            "ContainerArguments": arguments,
        },
        "RoleArn": options.role_arn,
        "OutputDataConfig": {"S3OutputPath": output},
        "ResourceConfig": {
            "InstanceType": instance_type(spec),
            "InstanceCount": 1,
            "VolumeSizeInGB": options.volume_size_gib,
        },
        "StoppingCondition": stopping,
        "EnableManagedSpotTraining": spec.spot,
        "Environment": dict(env),
        "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
    }
    if options.kms_key_id:
        request["OutputDataConfig"]["KmsKeyId"] = options.kms_key_id
    if options.volume_kms_key_id:
        request["ResourceConfig"]["VolumeKmsKeyId"] = options.volume_kms_key_id
    if options.subnets or options.security_group_ids:
        request["VpcConfig"] = {
            "Subnets": list(options.subnets),
            "SecurityGroupIds": list(options.security_group_ids),
        }
    return request


def split_command(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command into entrypoint and arguments. The arguments must not be empty: SageMaker
    would add its own, ``train``."""
    first = max(1, len(command) - MAX_ITEMS)
    if len(command) < 2 or first > MAX_ITEMS or max(map(len, command)) > MAX_CHARS:
        raise LaunchRefused(
            f"command: expected 2 to {2 * MAX_ITEMS} parts of at most {MAX_CHARS} characters, "
            f"found {len(command)} of at most {max(map(len, command), default=0)}"
        )
    return list(command[:first]), list(command[first:])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]
