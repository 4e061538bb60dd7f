"""What one training job is asked for with: its name, its options, the CreateTrainingJob request.

Pure: nothing here talks to AWS. The limits are the API's own
(docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html,
API_AlgorithmSpecification.html).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executors.base import CodeRef, LaunchRefused, ReplicaSpec

NAME_CHARS = 63
MAX_ITEMS = 100
MAX_CHARS = 256
"""Of ContainerEntrypoint and of ContainerArguments: items, and characters of each."""

LONGEST_RUN_S = 432_000
"""What SageMaker's quota "Longest run time for a training job" gives to every account."""

CPU = "ml.m5.large"
"""What ``cpu``, the hardware of a spec that names none, means here."""

OF_EXECUTOR = ("regions", "max_runtime_s", "poll_s", "answer_s")
"""Options of the executor as a whole."""

POOL_OPTIONS = frozenset({"volume_size_gib", "spot_wait_s", "python"})
"""Options a pool can set by itself. Roles, networks, keys and outputs reach into the account."""

ROLE = re.compile(r"arn:aws[a-z-]*:iam::(\d{12}):role/?[a-zA-Z_0-9+=,.@\-_/]+")
IMAGE = re.compile(
    r"\d{12}\.dkr\.ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?"
    r"/[a-z0-9._/-]+(?::[\w][\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The executor's options; a spec's own go before them, except :data:`OF_EXECUTOR`.

    ``role_arn``: the execution role, which reads and writes the rendezvous. ``image``: an image in
    ECR with Python. ``output_path``: where SageMaker puts what a job leaves in ``/opt/ml/model``;
    by default ``sagemaker/`` in the rendezvous. ``spot_wait_s``: how much longer than its
    deadline a spot job may take, waiting for a machine. ``kms_key_id`` encrypts output and
    secret, ``volume_kms_key_id`` the disk (not on instances with disks of their own).

    ``regions``: where pools may start jobs and where jobs are looked for. ``max_runtime_s``: what
    the account may ask for. ``poll_s``: how often something that waits for jobs, or follows a
    log, looks. ``answer_s``: how long one answer is waited for.
    """

    role_arn: str = ""
    image: str = ""
    output_path: str = ""
    regions: tuple[str, ...] = ()
    subnets: tuple[str, ...] = ()
    security_group_ids: tuple[str, ...] = ()
    volume_size_gib: int = 50
    kms_key_id: str = ""
    volume_kms_key_id: str = ""
    max_runtime_s: int = LONGEST_RUN_S
    spot_wait_s: int = 3600
    python: str = "python"
    poll_s: float = 2.0
    answer_s: float = 30.0

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        """Raises :class:`ValueError` for a name nobody knows or a value of another kind."""
        return cls()._with(given, allowed=[field.name for field in dataclasses.fields(cls)])

    def of(self, spec: ReplicaSpec) -> Options:
        """These for one job. Raises :class:`ValueError`."""
        fields = [field.name for field in dataclasses.fields(self)]
        own = [name for name in fields if name not in OF_EXECUTOR]
        return self._with(spec.options, allowed=own)

    def _with(self, given: Mapping[str, Any], *, allowed: Sequence[str]) -> Options:
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in allowed:
                raise ValueError(f"options: expected some of {', '.join(allowed)}, found {name!r}")
            values[name] = _read(name, value, type(getattr(self, name)))
        return dataclasses.replace(self, **values)


def _read(name: str, value: object, kind: type) -> object:
    if kind is tuple:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
            return tuple(value)
        raise ValueError(f"{name}: expected a list of names, found {value!r}")
    if kind is int:
        number = int(value) if isinstance(value, str) and value.isdecimal() else value
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(f"{name}: expected a whole number, not negative, found {value!r}")
        return number
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(f"{name}: expected a number above 0, found {value!r}")
        return float(value)
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected text, found {value!r}")
    return value


def name_prefix(deployment: str) -> str:
    """How the names of all jobs of a deployment begin, and of no other's: it ends with the first
    ``--`` of the name."""
    plain = re.sub(r"[^a-z0-9]+", "-", deployment.lower()).strip("-")[:24].strip("-")
    if plain != deployment or not plain:
        plain = f"{plain}-{_digest(deployment)}".lstrip("-")
    return f"{plain}--"


def job_name(deployment: str, launch_key: str) -> str:
    """The name of a key's job, which no other job of account and region ever had or will have.

    A long key is cut, with a digest behind a capital ``X``: keys have no capitals, so a name that
    has none tells its key (:func:`key_of`).
    """
    prefix = name_prefix(deployment)
    name = prefix + launch_key
    if len(name) <= NAME_CHARS:
        return name
    digest = _digest(launch_key)
    room = NAME_CHARS - len(prefix) - len(digest) - 2
    return f"{prefix}{launch_key[:room].strip('-')}-X{digest}"


def key_of(deployment: str, name: str) -> str | None:
    """The launch key of a job by its name; None where the name does not tell."""
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
    """What ``create_training_job`` is called with. Raises :class:`LaunchRefused` for what it would
    not take and would not name as clearly."""
    needed = {
        "role_arn": options.role_arn,
        "image": spec.image or options.image,
        "output_path": output,
    }
    missing = [option for option, value in needed.items() if not value]
    if missing:
        raise LaunchRefused(f"SageMaker options: expected {', '.join(missing)}, found none")
    run_s = deadline_s(spec, options)
    if not 1 <= run_s <= options.max_runtime_s:
        raise LaunchRefused(
            f"timeout_s: expected 1 to {options.max_runtime_s} s (the option max_runtime_s), "
            f"found {run_s}"
        )
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
    """The command as entrypoint and arguments: without arguments of ours SageMaker adds its own,
    ``train``."""
    first = max(1, len(command) - MAX_ITEMS)
    if len(command) < 2 or first > MAX_ITEMS or max(map(len, command)) > MAX_CHARS:
        raise LaunchRefused(
            f"command: expected 2 to {2 * MAX_ITEMS} parts of at most {MAX_CHARS} characters, "
            f"found {len(command)} of at most {max(map(len, command), default=0)}"
        )
    return list(command[:first]), list(command[first:])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]
