"""The objects that make one attempt, as the plain JSON Kubernetes takes. Pure functions.

A *Job* (``batch/v1``) of one completion that is never tried again: the control plane decides about
that, and under another key. A Job that needs a Secret is created suspended, so that no pod waits
for a Secret that does not exist yet; :func:`completion` resumes it. Its pod failure policy leaves
in the Job's own status, which outlives the pod, whether the pod was taken away (condition
DisruptionTarget) or failed, and with what exit code. The deadline is the *pod's*: unlike the Job's
it counts from when a node was found, and the pod stays, with its log, when it is over.

A *Secret* (``v1``) of the same name, owned by the Job, holds what is secret; it goes with the Job.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from executors.base import LaunchRefused, ReplicaSpec
from executors.kubernetes.hardware import PRODUCT_LABEL
from executors.kubernetes.options import (
    KUEUE_PREFIX,
    QUEUE_LABEL,
    Json,
    Machine,
    Options,
    check_label,
)

CONTAINER = "replica"
KEY_ANNOTATION = "archipelago-key"
CANCELLED_ANNOTATION = "archipelago-cancelled"
COMPLETE_ANNOTATION = "archipelago-complete"
"""All objects of the attempt exist."""
SHARED_MEMORY = "archipelago-shared-memory"

_NAME_CHARS = 52
_DIGEST_CHARS = 10


def name_of(deployment: str, launch_key: str) -> str:
    """The name of a key's Job and Secret: readable, at most 63 characters, and another one for
    the same key of another deployment in the namespace."""
    digest = hashlib.sha256(f"{deployment}/{launch_key}".encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{launch_key[:_NAME_CHARS].rstrip('-')}-{digest}"


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
    holds. Raises :class:`LaunchRefused` where there is no image, or a label is none.

    With secrets it is created suspended, and without its queue: :func:`completion` adds both once
    the Secret exists. Without, it is complete at once. Kueue's own labels go to the Job only: on
    a pod they mean that Kueue manages the pod itself.
    """
    image = spec.image or options.image
    if not image:
        raise LaunchRefused("image: expected the option image or an image of the job, found none")
    labels = {key: check_label(f"label {key}", value) for key, value in labels.items()}
    of_pod = {k: v for k, v in options.labels.items() if not k.startswith(KUEUE_PREFIX)} | labels
    of_job = {k: v for k, v in options.labels.items() if k != QUEUE_LABEL} | labels
    annotations = {**options.annotations, KEY_ANNOTATION: spec.launch_key}
    if not secrets:
        annotations[COMPLETE_ANNOTATION] = "true"
        of_job |= {QUEUE_LABEL: options.queue} if options.queue else {}
    pod = _pod(name, spec, options, machine, image, command, env, secrets)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "labels": of_job,
            "annotations": annotations,
        },
        "spec": {
            "suspend": bool(secrets or options.queue),
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
                "metadata": {"labels": of_pod, "annotations": dict(options.annotations)},
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


def completion(queue: str) -> Json:
    """The patch of a Job whose Secret exists: it starts, or enters its queue, which starts it.

    Kueue permits a change of the queue's name while a Job is suspended.
    https://kueue.sigs.k8s.io/docs/tasks/run/jobs/
    """
    done: Json = {"metadata": {"annotations": {COMPLETE_ANNOTATION: "true"}}}
    if queue:
        done["metadata"]["labels"] = {QUEUE_LABEL: queue}
    else:
        done["spec"] = {"suspend": False}
    return done


def cancellation() -> Json:
    """The patch that ends a Job and keeps it: a deleted Job would be forgotten, and its key could
    start once more. A Job past its own deadline has its pods ended with their grace, and is failed
    for good; ours have no other such deadline."""
    return {
        "metadata": {"annotations": {CANCELLED_ANNOTATION: "true"}},
        "spec": {"activeDeadlineSeconds": 1},
    }


def withdrawal(*, leave_queue: bool) -> Json:
    """The patch, after :func:`cancellation`, of a Job that is suspended: its deadline does not run
    then. It gets no pods (``parallelism`` 0), and leaves its queue unless the queue holds quota for
    it already. :data:`RESUMPTION` then lets the deadline end it, so that the cluster clears it
    away like any other ended Job.

    https://kubernetes.io/docs/concepts/workloads/controllers/job/#suspending-a-job
    """
    patch: Json = {"spec": {"parallelism": 0}}
    if leave_queue:
        patch["metadata"] = {"labels": {QUEUE_LABEL: None}}
    return patch


RESUMPTION: Json = {"spec": {"suspend": False}}


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
