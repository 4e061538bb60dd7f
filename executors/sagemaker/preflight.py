"""Check a launch on SageMaker without starting a job.

Quotas come from Service Quotas (docs.aws.amazon.com/servicequotas/2019-06-24/apireference/
API_ListServiceQuotas.html) if the credential permits it; their current usage is not available. The
execution role and access to the image cannot be checked without a job.
"""

from __future__ import annotations

from collections.abc import Iterator

from executors.base import ExecutorError, Problem, ReplicaSpec
from executors.sagemaker.client import Clients, aws_errors
from executors.sagemaker.options import Options
from executors.sagemaker.request import IMAGE, ROLE, instance_type


def identity_of(clients: Clients, region: str) -> tuple[str, str]:
    """Account and ARN of the credential, which must be allowed to list training jobs in the
    region."""
    with aws_errors():
        identity = clients.get("sts", region).get_caller_identity()
        clients.get("sagemaker", region).list_training_jobs(MaxResults=1)
    return str(identity["Account"]), str(identity["Arn"])


def problems(
    clients: Clients, options: Options, spec: ReplicaSpec, count: int, *, region: str
) -> list[Problem]:
    found = [*_request_problems(clients, options, spec, region)]
    try:
        account, _ = identity_of(clients, region)
    except ExecutorError as error:
        return [*found, Problem(field="credential", message=str(error))]
    role = ROLE.fullmatch(options.role_arn)
    if role and role[1] != account:
        message = f"role_arn: expected a role of account {account}, found {options.role_arn}"
        found.append(Problem(field="options", message=message))
    return [*found, *_quota_problems(clients, spec, count, region)]


def _request_problems(
    clients: Clients, options: Options, spec: ReplicaSpec, region: str
) -> Iterator[Problem]:
    kind = instance_type(spec)
    if kind not in clients.instance_types():
        yield Problem(
            field="hardware",
            message=f"expected an instance type of SageMaker training, e.g. ml.g5.xlarge, "
            f"found {spec.hardware!r}",
        )
    if not ROLE.fullmatch(options.role_arn):
        yield Problem(
            field="options",
            message="role_arn: expected arn:aws:iam::<account>:role/<name>, "
            f"found {options.role_arn!r}",
        )
    image = spec.image or options.image
    named = IMAGE.fullmatch(image)
    if not named:
        yield Problem(
            field="image",
            message="expected an image in ECR, "
            f"<account>.dkr.ecr.{region}.amazonaws.com/<name>:<tag>, found {image!r}",
        )
    elif named["region"] != region:
        yield Problem(
            field="image",
            message=f"expected an image in the registry of {region}, found {image!r}",
        )
    if options.output_path and not options.output_path.startswith("s3://"):
        yield Problem(
            field="options",
            message=f"output_path: expected s3://bucket/prefix, found {options.output_path!r}",
        )
    if bool(options.subnets) != bool(options.security_group_ids):
        yield Problem(
            field="options",
            message="expected subnets and security_group_ids, or neither",
        )


def _quota_problems(
    clients: Clients, spec: ReplicaSpec, count: int, region: str
) -> Iterator[Problem]:
    kind = instance_type(spec)
    quota_name = f"{kind} for {'spot ' if spec.spot else ''}training job usage"
    try:
        limit = _limit(clients, region, quota_name)
    except ExecutorError:
        return  # an optional permission
    if limit is not None and limit < count:
        yield Problem(
            field="hardware",
            message=f"the quota {quota_name!r} of {region} is {limit:g}, expected {count} or more: "
            "request an increase at Service Quotas",
        )


def _limit(clients: Clients, region: str, quota_name: str) -> float | None:
    """The value of a quota, by its name: the API can select quotas by code only."""
    with aws_errors():
        pages = clients.get("service-quotas", region).get_paginator("list_service_quotas")
        for page in pages.paginate(ServiceCode="sagemaker", PaginationConfig={"PageSize": 100}):
            for quota in page["Quotas"]:
                if quota["QuotaName"] == quota_name:
                    return float(quota["Value"])
    return None
