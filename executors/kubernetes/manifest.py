"""The objects of one attempt, as Kubernetes JSON. Pure functions.

A *Job* (``batch/v1``) of one completion without retries: the control plane relaunches a replica
under another key. A Job that needs a Secret is created suspended, so that no pod waits for a
missing Secret; :func:`completion` resumes it. The pod failure policy records in the Job's status,
which outlives the pod, whether the pod was disrupted (condition DisruptionTarget) or failed, and
the exit code. The deadline is the *pod's*: unlike the Job's it starts when a node is assigned, and
the pod remains, with its log, after it.

A *Secret* (``v1``) of the same name, owned by the Job and deleted with it, holds the secrets.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from executors.base import JobRequest, LaunchRefused
from executors.bootstrap.command import command
from executors.kubernetes.hardware import PRODUCT_LABEL
from executors.kubernetes.options import (
    KUEUE_PREFIX,
    QUEUE_LABEL,
    Machine,
    Options,
    check_label,
)
from executors.options import Json

CONTAINER = "replica"
KEY_ANNOTATION = "archipelago-key"
CANCELLED_ANNOTATION = "archipelago-cancelled"
COMPLETE_ANNOTATION = "archipelago-complete"
"""All objects of the attempt exist."""
SHARED_MEMORY = "archipelago-shared-memory"

_NAME_CHARS = 52
_DIGEST_CHARS = 10


def name_of(deployment: str, launch_key: str) -> str:
    """The name of a key's Job and Secret: readable, at most 63 characters, and different for the
    same key of another deployment in the namespace."""
    digest = hashlib.sha256(f"{deployment}/{launch_key}".encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{launch_key[:_NAME_CHARS].rstrip('-')}-{digest}"


def job(
    name: str,
    request: JobRequest,
    *,
    options: Options,
    machine: Machine,
    labels: Mapping[str, str],
) -> Json:
    """The Job of one attempt.

    With secrets the Job is suspended and has no queue; :func:`completion` changes both once the
    Secret exists. Without secrets it is complete at once. Kueue's labels are set on the Job only:
    on a pod they would make Kueue manage the pod itself.

    Raises :class:`LaunchRefused` without an image, or for an invalid label.
    """
    labels = {key: check_label(f"label {key}", value) for key, value in labels.items()}
    of_pod = {k: v for k, v in options.labels.items() if not k.startswith(KUEUE_PREFIX)} | labels
    of_job = {k: v for k, v in options.labels.items() if k != QUEUE_LABEL} | labels
    annotations = {**options.annotations, KEY_ANNOTATION: request.spec.launch_key}
    if not request.secrets:
        annotations[COMPLETE_ANNOTATION] = "true"
        of_job |= {QUEUE_LABEL: options.queue} if options.queue else {}
    pod = _pod(name, request, options, machine)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "labels": of_job,
            "annotations": annotations,
        },
        "spec": {
            "suspend": bool(request.secrets or options.queue),
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
                        # Means "no conditions"; the schema of 1.28 calls it required.
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
    """The Secret of one attempt, which the cluster deletes with its Job."""
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
    """The patch of a Job whose Secret exists: it resumes the Job or adds it to its queue.

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
    """The patch that ends a Job without deleting it: the key of a deleted Job could start again.

    Past a Job's own deadline the cluster ends its pods with their grace period and marks the Job as
    failed. These Jobs have no such deadline otherwise.
    """
    return {
        "metadata": {"annotations": {CANCELLED_ANNOTATION: "true"}},
        "spec": {"activeDeadlineSeconds": 1},
    }


def withdrawal(*, leave_queue: bool) -> Json:
    """The patch, after :func:`cancellation`, of a suspended Job, whose deadline does not run.

    The Job gets no pods (``parallelism`` 0), and leaves its queue unless the queue already holds
    quota for it. :data:`RESUMPTION` then starts the deadline, so that the cluster cleans the Job up
    like any other ended Job.

    https://kubernetes.io/docs/concepts/workloads/controllers/job/#suspending-a-job
    """
    patch: Json = {"spec": {"parallelism": 0}}
    if leave_queue:
        patch["metadata"] = {"labels": {QUEUE_LABEL: None}}
    return patch


RESUMPTION: Json = {"spec": {"suspend": False}}


def merged(base: Json, over: Mapping[str, Any]) -> Json:
    """``base`` updated with ``over``: mappings are merged, other values replaced."""
    result = dict(base)
    for key, value in over.items():
        known = result.get(key)
        if isinstance(known, dict) and isinstance(value, Mapping):
            value = merged(known, value)
        result[key] = value
    return result


def _pod(name: str, request: JobRequest, options: Options, machine: Machine) -> Json:
    image = request.spec.image or options.image
    if not image:
        raise LaunchRefused("image: expected the option image or an image of the job, found none")
    line = command(request.entrypoint, request.args, python=options.python, code=request.code)
    memory: Json = {"medium": "Memory"}
    if options.shared_memory:
        memory["sizeLimit"] = options.shared_memory
    limits = dict(machine.limits)
    if machine.gpus:
        limits[machine.gpu_resource] = str(machine.gpus)
    container: Json = {
        "name": CONTAINER,
        "image": image,
        "command": [_escaped(part) for part in line],
        "env": [
            *({"name": key, "value": _escaped(value)} for key, value in request.env.items()),
            *(
                {"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
                for key in sorted(request.secrets)
            ),
        ],
        "resources": {"requests": dict(machine.requests), "limits": limits},
        # Adds the last lines of a failed replica's log to its state.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            # The default of 64 MiB is too small for the workers of torch's DataLoader.
            {"name": SHARED_MEMORY, "mountPath": "/dev/shm"},  # noqa: S108
            *options.volume_mounts,
        ],
    }
    pod: Json = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_s,
        # A replica makes no requests to the cluster.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "nodeSelector": dict(machine.node_selector),
        "tolerations": list(machine.tolerations),
        "containers": [merged(container, options.container)],
        "volumes": [{"name": SHARED_MEMORY, "emptyDir": memory}, *options.volumes],
    }
    if request.spec.timeout_s is not None:
        pod["activeDeadlineSeconds"] = max(1, math.ceil(request.spec.timeout_s))
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


def _escaped(text: str) -> str:
    """Escape ``$``: Kubernetes expands ``$(NAME)`` in commands and values, and ``$$`` to ``$``."""
    return text.replace("$", "$$")
