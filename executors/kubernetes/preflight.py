"""Check a launch without starting it: permissions, a server-side dry run, quotas and nodes.

Quotas and nodes are checked if the credential can read them. Quotas with scopes are ignored, and so
is the current use of nodes: waiting in a queue is no error.
"""

from __future__ import annotations

import contextlib
from decimal import Decimal
from typing import Any

from executors.base import AccountError, LaunchRefused, Problem
from executors.kubernetes.client import RIGHTS, AlreadyThere, Cluster
from executors.kubernetes.hardware import PRODUCT_LABEL
from executors.kubernetes.options import REGION_LABEL, Machine
from executors.options import Json

_UNLESS_AUTOSCALED = "(set the option autoscaled if nodes are created on demand)"


def problems(
    cluster: Cluster, job: Json, machine: Machine, count: int, *, autoscaled: bool = False
) -> list[Problem]:
    """Problems of launching ``count`` Jobs like ``job``. ``autoscaled`` skips the check of
    nodes."""
    try:
        missing = [
            f"{verb} {resource}"
            for group, resource, verb in RIGHTS
            if not cluster.is_allowed(group, resource, verb)
        ]
    except AccountError as error:
        return [Problem(field="credential", message=str(error))]
    if missing:
        message = (
            f"expected to be allowed to {', '.join(missing)} in namespace {cluster.namespace}: "
            "see the Role in docs/backends/kubernetes.md"
        )
        return [Problem(field="credential", message=message)]
    try:
        cluster.create_job(job, dry_run=True)
    except AlreadyThere:
        pass
    except LaunchRefused as error:
        return [Problem(field="options", message=str(error))]
    found = []
    pod = job["spec"]["template"]["spec"]
    with contextlib.suppress(AccountError):
        found += over_quota(cluster.list_quotas(), pod, count)
    if not autoscaled:
        with contextlib.suppress(AccountError):
            found += without_node(cluster.list_nodes(), machine, count)
    return found


def over_quota(quotas: list[Json], pod: Json, count: int) -> list[Problem]:
    """Quotas of the namespace that ``count`` such pods would exceed."""
    needs = {name: count * each for name, each in _needs(pod).items()}
    found = []
    for quota in quotas:
        spec = quota.get("spec") or {}
        if spec.get("scopes") or spec.get("scopeSelector"):
            continue
        status = quota.get("status") or {}
        hard, used = status.get("hard") or {}, status.get("used") or {}
        for name, need in needs.items():
            if name not in hard:
                continue
            left = _number(hard[name]) - _number(used.get(name, "0"))
            if need > left:
                found.append(
                    Problem(
                        field="hardware",
                        message=f"quota {quota['metadata']['name']}: expected {_text(need)} of "
                        f"{name} for {count}, found {_text(max(left, Decimal(0)))} left of "
                        f"{hard[name]}",
                    )
                )
    return found


def without_node(nodes: list[Json], machine: Machine, count: int) -> list[Problem]:
    """Whether nodes that would take such a pod are there, and enough for all at once."""
    region = machine.node_selector.get(REGION_LABEL)
    regions = {(node["metadata"].get("labels") or {}).get(REGION_LABEL) for node in nodes}
    if region is not None and region not in regions:
        known = ", ".join(sorted(filter(None, regions))) or "no region of any node"
        message = f"region: expected one of {known}, found {region!r} {_UNLESS_AUTOSCALED}"
        return [Problem(field="region", message=message)]
    fit = [node for node in nodes if _takes(node, machine)]
    if machine.gpus:
        room = sum(_allocatable(node, machine) // machine.gpus for node in fit)
        what = f"{machine.gpus} {machine.gpu_resource}"
        if machine.products:
            what += f" labelled {PRODUCT_LABEL} {' or '.join(machine.products)}"
    else:
        room = count if fit else 0
        what = "no GPU"
    if machine.node_selector:
        what += f" and labels {dict(machine.node_selector)}"
    if room >= count:
        return []
    if room:
        message = f"expected room for {count} pods of {what}, found nodes for {room} at once"
    else:
        message = f"expected a schedulable node with {what}, found none of {len(nodes)} nodes"
    return [Problem(field="hardware", message=f"{message} {_UNLESS_AUTOSCALED}")]


def _takes(node: Json, machine: Machine) -> bool:
    labels = node["metadata"].get("labels") or {}
    spec = node.get("spec") or {}
    if spec.get("unschedulable") or not machine.node_selector.items() <= labels.items():
        return False
    if machine.products and labels.get(PRODUCT_LABEL) not in machine.products:
        return False
    if any(not _tolerates(machine, taint) for taint in spec.get("taints") or ()):
        return False
    return _allocatable(node, machine) >= machine.gpus


def _tolerates(machine: Machine, taint: Json) -> bool:
    """https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/"""
    if taint.get("effect") == "PreferNoSchedule":
        return True
    return any(
        toleration.get("effect", "") in ("", taint.get("effect"))
        and (
            toleration.get("key", taint["key"]) == taint["key"]
            if toleration.get("operator") == "Exists"
            else (toleration.get("key"), toleration.get("value", ""))
            == (taint["key"], taint.get("value", ""))
        )
        for toleration in machine.tolerations
    )


def _allocatable(node: Json, machine: Machine) -> int:
    found = (node.get("status") or {}).get("allocatable") or {}
    return int(found.get(machine.gpu_resource, 0)) if machine.gpus else 0


def _needs(pod: Json) -> dict[str, Decimal]:
    """The resources that one pod uses, by the names of quotas."""
    resources = pod["containers"][0].get("resources") or {}
    limits = resources.get("limits") or {}
    requests = {**limits, **(resources.get("requests") or {})}
    needs = {name: Decimal(1) for name in ("pods", "count/pods", "count/jobs.batch")}
    for name, given in requests.items():
        needs[f"requests.{name}"] = needs[name] = _number(given)
    return needs | {f"limits.{name}": _number(given) for name, given in limits.items()}


def _number(quantity: Any) -> Decimal:
    from kubernetes.utils.quantity import parse_quantity

    try:
        return Decimal(parse_quantity(quantity))  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise LaunchRefused(
            f"expected a quantity such as 500m or 16Gi, found {quantity!r}"
        ) from error


def _text(number: Decimal) -> str:
    return f"{number.normalize():f}"
