"""Create the objects of one attempt idempotently, and end a suspended Job.

1. Create the Job, suspended if it has secrets.
2. Create its Secret, owned by the Job, so that it never outlives the Job.
3. Mark the Job as complete, and resume it or add it to its queue.

Each step can be repeated. A caller that dies between two steps leaves a suspended Job, which runs
nothing until the next call or :func:`withdraw`.
"""

from __future__ import annotations

from collections.abc import Mapping

from executors.base import AccountError, LaunchRefused, RetryLater
from executors.kubernetes import manifest
from executors.kubernetes import status as states
from executors.kubernetes.client import AlreadyThere, Cluster, Gone
from executors.options import Json


def ensure(cluster: Cluster, job: Json, secrets: Mapping[str, str], *, queue: str) -> None:
    """Create the missing objects of an attempt. An ended or cancelled Job is left unchanged.

    Args:
        job: the wanted Job, from :func:`executors.kubernetes.manifest.job`.
        secrets: values of the variables that its container reads from its Secret.
        queue: the Kueue LocalQueue that starts it; empty to start it at once.
    """
    created = _create_or_read(cluster, job)
    if states.ended(created) is not None or states.is_cancelled(created):
        return
    if secrets:
        _ensure_secret(cluster, created, secrets)
    if not states.is_complete(created):
        _complete(cluster, created["metadata"]["name"], queue)


def withdraw(cluster: Cluster, name: str) -> None:
    """End a cancelled Job that is suspended. A Job that holds quota of a queue stays in the queue,
    without pods, until the queue releases it."""
    try:
        cluster.patch_job(name, manifest.withdrawal(leave_queue=True))
    except AccountError:
        raise
    except LaunchRefused:
        cluster.patch_job(name, manifest.withdrawal(leave_queue=False))
    else:
        cluster.patch_job(name, manifest.RESUMPTION)


def is_of(job: Json, launch_key: str) -> bool:
    """Whether a Job belongs to that launch key: names could collide."""
    annotations = job["metadata"].get("annotations") or {}
    return bool(annotations.get(manifest.KEY_ANNOTATION) == launch_key)


def _create_or_read(cluster: Cluster, job: Json) -> Json:
    name = job["metadata"]["name"]
    launch_key = job["metadata"]["annotations"][manifest.KEY_ANNOTATION]
    try:
        return cluster.create_job(job)
    except AlreadyThere as error:
        existing = cluster.read_job(name)
        if existing is None:
            raise RetryLater(f"Job {name} existed and was deleted: {error}") from error
        if not is_of(existing, launch_key):
            raise LaunchRefused(
                f"Job {name}: expected that of launch key {launch_key}, found a different key"
            ) from error
        return existing


def _ensure_secret(cluster: Cluster, job: Json, secrets: Mapping[str, str]) -> None:
    """Create the Secret of the Job's pod, and replace one that an interrupted call left: its values
    can be older, or its owner another Job of that name. A pod that can have started keeps its
    Secret.

    If the Secret is refused, the Job is deleted, so that no object remains.
    """
    meta = job["metadata"]
    wanted = manifest.secret(
        meta["name"], job_uid=meta["uid"], labels=meta["labels"], values=secrets
    )
    can_have_started = states.is_complete(job) or not states.is_suspended(job)
    try:
        try:
            cluster.create_secret(wanted)
        except AlreadyThere:
            if can_have_started:
                return
            cluster.delete_secret(meta["name"])
            cluster.create_secret(wanted)
    except AlreadyThere as error:  # created by another call at the same time
        raise RetryLater(f"Secret {meta['name']} is being created: {error}") from error
    except LaunchRefused:
        if not can_have_started:
            cluster.delete_job(meta["name"], meta["uid"])
        raise


def _complete(cluster: Cluster, name: str, queue: str) -> None:
    try:
        cluster.patch_job(name, manifest.completion(queue))
    except Gone as error:
        raise RetryLater(f"Job {name} was deleted while it was created: {error}") from error
