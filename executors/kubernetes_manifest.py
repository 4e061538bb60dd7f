"""The objects that make one attempt, as the plain JSON Kubernetes takes. Pure functions.

A *Job* (``batch/v1``) of one completion that is never tried again: the control plane decides about
that, and under another key. Its pod failure policy leaves in the Job's own status, which outlives
the pod, whether the pod was taken away (condition DisruptionTarget) or failed, and with what exit
code. The deadline is the *pod's*: unlike the Job's it counts from when a node was found, and the
pod stays, with its log, when it is over.

A *Secret* (``v1``) of the same name, owned by the Job, holds what is secret; it goes with the Job.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from executors.base import LaunchRefused, ReplicaSpec
from executors.hardware.kubernetes import PRODUCT_LABEL
from executors.kubernetes_options import Json, Machine, Options

CONTAINER = "replica"
KEY_ANNOTATION = "archipelago-key"
CANCELLED_ANNOTATION = "archipelago-cancelled"
SHARED_MEMORY = "archipelago-shared-memory"

_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_NAME_CHARS = 52
_DIGEST_CHARS = 10


def name_of(deployment: str, launch_key: str) -> str:
    """The name of a key's Job and Secret: readable, at most 63 characters, and another one for
    the same key of another deployment in the namespace."""
    digest = hashlib.sha256(f"{deployment}/{launch_key}".encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{launch_key[:_NAME_CHARS].rstrip('-')}-{digest}"


def check_label(what: str, value: str) -> str:
    """The value itself. Raises :class:`LaunchRefused` where Kubernetes takes none such."""
    if not _LABEL.fullmatch(value):
        raise LaunchRefused(
            f"{what}: expected at most 63 letters, digits, '-', '_' or '.', with a letter or digit "
            f"at either end (a Kubernetes label), found {value!r}"
        )
    return value


def job(
    name: str,
    *,
    spec: ReplicaSpec,
    options: Options,
    machine: Machine,
    labels: Mapping[str, str],
    command: Sequence[str],
    env: Mapping[str, str],
    secrets: Sequence[str] = (),
) -> Json:
    """The Job of one attempt. ``secrets`` are names of variables that the Secret of the same name
    holds. Raises :class:`LaunchRefused` where there is no image, or a label is none."""
    image = spec.image or options.image
    if not image:
        raise LaunchRefused("image: expected the option image or an image of the job, found none")
    labels = {key: check_label(f"label {key}", value) for key, value in labels.items()}
    pod = _pod(name, spec, options, machine, image, command, env, secrets)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "labels": labels,
            "annotations": {**options.annotations, KEY_ANNOTATION: spec.launch_key},
        },
        "spec": {
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": options.keep_s,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": CONTAINER,
                            "operator": "NotIn",
                            "values": [0],
                        },
                        # Means "none given"; the schema of 1.28 calls it required.
                        "onPodConditions": [],
                    },
                ]
            },
            "template": {
                "metadata": {"labels": labels, "annotations": dict(options.annotations)},
                "spec": merged(pod, options.pod),
            },
        },
    }


def secret(
    name: str, *, job_uid: str, labels: Mapping[str, str], values: Mapping[str, str]
) -> Json:
    """The Secret of one attempt, deleted by the cluster when its Job is."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "immutable": True,
        "metadata": {
            "name": name,
            "labels": dict(labels),
            "ownerReferences": [
                {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job_uid}
            ],
        },
        "data": {key: base64.b64encode(value.encode()).decode() for key, value in values.items()},
    }


def cancellation() -> Json:
    """The patch that ends a Job and keeps it: a deleted Job would be forgotten, and its key could
    start once more. A Job past its own deadline has its pods ended with their grace, and is failed
    for good; ours have no other such deadline."""
    return {
        "metadata": {"annotations": {CANCELLED_ANNOTATION: "true"}},
        "spec": {"activeDeadlineSeconds": 1},
    }


def merged(base: Json, over: Mapping[str, Any]) -> Json:
    """``base`` with ``over`` on top: mappings are merged, everything else is replaced."""
    result = dict(base)
    for key, value in over.items():
        known = result.get(key)
        if isinstance(known, dict) and isinstance(value, Mapping):
            value = merged(known, value)
        result[key] = value
    return result


def _pod(
    name: str,
    spec: ReplicaSpec,
    options: Options,
    machine: Machine,
    image: str,
    command: Sequence[str],
    env: Mapping[str, str],
    secrets: Sequence[str],
) -> Json:
    memory: Json = {"medium": "Memory"}
    if options.shared_memory:
        memory["sizeLimit"] = options.shared_memory
    limits = dict(machine.limits)
    if machine.gpus:
        limits[machine.gpu_resource] = str(machine.gpus)
    container: Json = {
        "name": CONTAINER,
        "image": image,
        "command": [_literally(part) for part in command],
        "env": [
            *({"name": key, "value": _literally(value)} for key, value in env.items()),
            *(
                {"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
                for key in secrets
            ),
        ],
        "resources": {"requests": dict(machine.requests), "limits": limits},
        # The last lines of a failed replica's log come with its state.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            # 64 MiB otherwise, which the workers of torch's DataLoader soon fill.
            {"name": SHARED_MEMORY, "mountPath": "/dev/shm"},  # noqa: S108
            *options.volume_mounts,
        ],
    }
    pod: Json = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_s,
        # A replica asks nothing of the cluster.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "nodeSelector": dict(machine.node_selector),
        "tolerations": list(machine.tolerations),
        "containers": [merged(container, options.container)],
        "volumes": [{"name": SHARED_MEMORY, "emptyDir": memory}, *options.volumes],
    }
    if spec.timeout_s is not None:
        pod["activeDeadlineSeconds"] = max(1, math.ceil(spec.timeout_s))
    if machine.products:
        pod["affinity"] = _one_of(machine.products)
    if options.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": each} for each in options.image_pull_secrets]
    if options.service_account:
        pod["serviceAccountName"] = options.service_account
    if options.priority_class:
        pod["priorityClassName"] = options.priority_class
    return pod


def _one_of(products: Sequence[str]) -> Json:
    match = {"key": PRODUCT_LABEL, "operator": "In", "values": list(products)}
    return {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [match]}]
            }
        }
    }


def _literally(text: str) -> str:
    """Kubernetes replaces ``$(NAME)`` in commands and values, and ``$$`` by ``$``."""
    return text.replace("$", "$$")
