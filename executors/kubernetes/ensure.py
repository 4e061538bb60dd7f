"""The objects of one attempt, brought to the wanted state, and a suspended Job's end.

1. The Job is created, suspended if it has secrets.
2. Its Secret is created, owned by the Job: it never outlives it.
3. The Job is marked as complete, and resumed or handed to its queue.

Each step can be repeated. A caller that dies between two of them leaves a suspended Job, which runs
nothing, until the next call or :func:`withdraw`.
"""

from __future__ import annotations

from collections.abc import Mapping

from executors import launching
from executors.base import LaunchRefused, NeedsPerson, RetryLater
from executors.kubernetes import manifest
from executors.kubernetes import status as states
from executors.kubernetes.client import AlreadyThere, Cluster, Gone
from executors.kubernetes.options import Json


def ensure(cluster: Cluster, job: Json, secrets: Mapping[str, str], *, queue: str) -> None:
    """Create what is missing of an attempt. A Job that has ended or is cancelled stays as it is.

    Args:
        job: the wanted Job, of :func:`executors.kubernetes.manifest.job`.
        secrets: values of the variables that its container reads from its Secret.
        queue: the Kueue LocalQueue that starts it; empty to start it at once.
    """
    made = _create_or_read(cluster, job)
    if states.ended(made) is not None or states.is_cancelled(made):
        return
    if secrets:
        _ensure_secret(cluster, made, secrets)
    if not states.is_complete(made):
        _complete(cluster, made["metadata"]["name"], queue)


def withdraw(cluster: Cluster, name: str) -> None:
    """End a suspended Job that was cancelled. One for which a queue holds quota stays in the queue,
    without pods, until the queue lets it go."""
    try:
        cluster.patch_job(name, manifest.withdrawal(leave_queue=True))
    except NeedsPerson:
        raise
    except LaunchRefused:
        cluster.patch_job(name, manifest.withdrawal(leave_queue=False))
    else:
        cluster.patch_job(name, manifest.RESUMPTION)


def is_of(job: Json, launch_key: str) -> bool:
    """Whether a Job was made for that launch key: names could collide."""
    annotations = job["metadata"].get("annotations") or {}
    return bool(annotations.get(manifest.KEY_ANNOTATION) == launch_key)


def _create_or_read(cluster: Cluster, job: Json) -> Json:
    name = job["metadata"]["name"]
    launch_key = job["metadata"]["annotations"][manifest.KEY_ANNOTATION]
    try:
        return cluster.create_job(job)
    except AlreadyThere as error:
        found = cluster.read_job(name)
        if found is None:
            raise RetryLater(f"Job {name} existed and is gone: {error}") from error
        if not is_of(found, launch_key):
            raise LaunchRefused(
                f"Job {name}: expected one of launch key {launch_key}, found another's"
            ) from error
        return found


def _ensure_secret(cluster: Cluster, job: Json, secrets: Mapping[str, str]) -> None:
    """Create the Secret that the Job's pod needs, and replace one that an interrupted call left:
    its values can be older, its owner another Job of that name. A pod that can have started keeps
    the Secret it has.

    A Job that can have no Secret is deleted, so that no object is left.
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
    except LaunchRefused as error:
        if not can_have_started:
            cluster.delete_job(meta["name"], meta["uid"])
        raise type(error)(launching.scrub(str(error), secrets.values())) from None


def _complete(cluster: Cluster, name: str, queue: str) -> None:
    try:
        cluster.patch_job(name, manifest.completion(queue))
    except Gone as error:
        raise RetryLater(f"Job {name} was deleted while it was created: {error}") from error
