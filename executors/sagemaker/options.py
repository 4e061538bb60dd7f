"""Options of SageMaker training jobs."""

from __future__ import annotations

from dataclasses import dataclass

from executors.options import Scope, option, poll_interval, request_timeout

LONGEST_RUN_S = 432_000
"""Default of every account's quota "Longest run time for a training job"."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Roles, networks, keys and outputs reach into the account, so pools cannot set them freely."""

    role_arn: str = option(
        label="Execution role",
        in_credential=True,
        help="arn:aws:iam::<account>:role/<name>. It reads and writes the rendezvous.",
    )
    image: str = option(
        label="Image",
        in_credential=True,
        help="Image in ECR with Python. A pool's own image replaces it.",
    )
    output_path: str = option(
        label="Output path",
        help="Where SageMaker stores the contents of /opt/ml/model. "
        "Leave empty for sagemaker/ in the rendezvous.",
    )
    regions: tuple[str, ...] = option(
        (),
        label="Regions",
        comma=True,
        scope=Scope.EXECUTOR,
        help="Regions where pools can start jobs and where jobs are listed",
    )
    subnets: tuple[str, ...] = option((), label="Subnets", comma=True)
    security_group_ids: tuple[str, ...] = option((), label="Security groups", comma=True)
    volume_size_gib: int = option(
        50,
        label="Disk size",
        unit="GiB",
        minimum=0,
        scope=Scope.POOL,
        help="Size of the EBS volume",
    )
    kms_key_id: str = option(label="KMS key", help="Encrypts the output and the secret")
    volume_kms_key_id: str = option(
        label="KMS key of the disk", help="Refused for instances with local disks"
    )
    max_runtime_s: int = option(
        LONGEST_RUN_S,
        label="Longest deadline",
        unit="s",
        minimum=0,
        scope=Scope.EXECUTOR,
        help='The account\'s quota "Longest run time for a training job"',
    )
    spot_wait_s: int = option(
        3600,
        label="Spot wait",
        unit="s",
        minimum=0,
        scope=Scope.POOL,
        help="Time that a spot job can wait for a machine, in addition to its deadline",
    )
    python: str = option(
        "python", label="Python", scope=Scope.POOL, help="The interpreter in the image"
    )
    poll_s: float = poll_interval(2.0)
    answer_s: float = request_timeout()
