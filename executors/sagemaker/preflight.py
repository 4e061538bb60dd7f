"""What launching on SageMaker would fail of, as far as can be known without starting anything.

The account's quotas come from Service Quotas (docs.aws.amazon.com/servicequotas/2019-06-24/
apireference/API_ListServiceQuotas.html), where it may be asked; how much of them is in use it does
not say. Whether the role can be assumed and the image pulled only a job shows.
"""

from __future__ import annotations

from collections.abc import Iterator

from executors.base import ExecutorError, Problem, ReplicaSpec
from executors.sagemaker.client import Clients, aws_errors
from executors.sagemaker.request import IMAGE, ROLE, Options, deadline_s, instance_type


def who(clients: Clients, region: str) -> tuple[str, str]:
    """Account and ARN, proven to be allowed to look at training jobs of the region."""
    with aws_errors():
        me = clients.get("sts", region).get_caller_identity()
        clients.get("sagemaker", region).list_training_jobs(MaxResults=1)
    return str(me["Account"]), str(me["Arn"])


def problems(
    clients: Clients, options: Options, spec: ReplicaSpec, count: int, *, region: str
) -> list[Problem]:
    found = [*_of_request(clients, options, spec, region)]
    try:
        account, _ = who(clients, region)
    except ExecutorError as error:
        return [*found, Problem(field="credential", message=str(error))]
    role = ROLE.fullmatch(options.role_arn)
    if role and role[1] != account:
        message = f"role_arn: expected a role of account {account}, found {options.role_arn}"
        found.append(Problem(field="options", message=message))
    return [*found, *_of_quota(clients, spec, count, region)]


def _of_request(
    clients: Clients, options: Options, spec: ReplicaSpec, region: str
) -> Iterator[Problem]:
    kind = instance_type(spec)
    if kind not in clients.instance_types():
        yield Problem(
            field="hardware",
            message=f"expected an instance type of SageMaker training, as ml.g5.xlarge, "
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
    if not 1 <= deadline_s(spec, options) <= options.max_runtime_s:
        yield Problem(
            field="timeout_s",
            message=f"expected 1 to {options.max_runtime_s} s, found {spec.timeout_s}",
        )


def _of_quota(clients: Clients, spec: ReplicaSpec, count: int, region: str) -> Iterator[Problem]:
    kind = instance_type(spec)
    wanted = f"{kind} for {'spot ' if spec.spot else ''}training job usage"
    try:
        limit = _limit(clients, region, wanted)
    except ExecutorError:
        return  # a permission of its own, that nothing else needs
    if limit is not None and limit < count:
        yield Problem(
            field="hardware",
            message=f"the quota {wanted!r} of {region} is {limit:g}, expected {count} or more: "
            "ask for it at Service Quotas",
        )


def _limit(clients: Clients, region: str, wanted: str) -> float | None:
    """SageMaker has thousands of quotas, and they can be asked for by number only."""
    with aws_errors():
        pages = clients.get("service-quotas", region).get_paginator("list_service_quotas")
        for page in pages.paginate(ServiceCode="sagemaker", PaginationConfig={"PageSize": 100}):
            for quota in page["Quotas"]:
                if quota["QuotaName"] == wanted:
                    return float(quota["Value"])
    return None
