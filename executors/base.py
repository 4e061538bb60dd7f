"""The values that executors take and return: a replica to launch, its job, its state, its errors.

A :class:`ReplicaHandle` is plain JSON and works in any process. The *launch key* is the name that
identifies a job at its backend. :data:`JobState.UNKNOWN` means that the backend did not respond. It
is not a failure.

Errors show how to react: retry later (:class:`RetryLater`), correct a credential, a quota or a
payment (:class:`AccountError`), or change the request (:class:`LaunchRefused`).
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class ExecutorError(Exception):
    """Base class of executor errors. The message is the backend's own if it has one."""


class RetryLater(ExecutorError):
    """A temporary error: the backend is down, slow, or out of capacity.

    Args:
        after_s: delay that the backend requests; None if it names none.
        attempts: consecutive launches to attempt before intervention is required; None for no
            limit. Set where the backend's message does not show whether waiting helps.
    """

    def __init__(
        self, message: str, *, after_s: float | None = None, attempts: int | None = None
    ) -> None:
        super().__init__(message)
        self.after_s = after_s
        self.attempts = attempts


class NoCapacity(RetryLater):
    """The backend is full: the account's quota is in use, no machine is free, or a disk is full.

    The error does not depend on the request; the launch is repeated until there is capacity. A
    quota below the request itself (a limit of zero) is :class:`AccountError` instead.

    Args:
        pending: what the launch waits for; the quota by default.
    """

    def __init__(
        self,
        message: str,
        *,
        after_s: float | None = None,
        attempts: int | None = None,
        pending: PendingCause | None = None,
    ) -> None:
        super().__init__(message, after_s=after_s, attempts=attempts)
        self.pending = pending or PendingCause.QUOTA


class LaunchRefused(ExecutorError):
    """The request is invalid; a retry does not help."""


class AccountError(LaunchRefused):
    """Intervention is required: a credential is wrong or expired, or a permission, a quota or a
    payment is missing. No request of the account succeeds before that."""


class JobState(enum.StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"


class PendingCause(enum.StrEnum):
    """Why a job has not started. It determines how long the control plane waits and what it does
    next (:func:`runs.reconcile.retry_policy.pending_limit_s`)."""

    STARTING = "starting"
    """A machine boots or an image is pulled: a normal start."""
    QUEUED = "queued"
    """Not admitted by a queue (Kueue). Waits without a limit, because the queue decides."""
    CAPACITY = "capacity"
    """No machine is free, or none matches the request."""
    QUOTA = "quota"
    """The quota is in use by other jobs."""
    IMAGE = "image"
    """The image cannot be pulled, or its name is invalid."""
    INCOMPLETE = "incomplete"
    """A required object (a Secret, a ConfigMap, a volume) is missing: repeat ``ensure``."""
    REFUSED = "refused"
    """Refused until an operator acts: a quota below the request, a security policy, a missing
    service account."""


class Cause(enum.StrEnum):
    """Why a job ended."""

    DONE = "done"
    ERROR = "error"
    OUT_OF_MEMORY = "out_of_memory"
    PREEMPTED = "preempted"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    LOST = "lost"
    """The backend has no record of the job."""


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """Configuration of one executor. Two executors with the same configuration see the same jobs.

    Args:
        deployment: label of this control plane's jobs. It separates them from other jobs of the
            account, which are therefore never taken for orphans.
        credentials: values by the backend's environment variables (``MODAL_TOKEN_ID``). The SDK
            reads missing ones from the environment of this process.
        options: the backend's options (:class:`executors.backend.Backend`).
        state_dir: folder for the files of local jobs.
    """

    deployment: str = "archipelago"
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    state_dir: Path | None = None


@dataclass(frozen=True, kw_only=True)
class CodeRef:
    """The code of a replica, stored in its rendezvous: see :mod:`executors.bootstrap.command`.

    Args:
        uri: the rendezvous.
        sha256: digest of the bundle ``code/<sha256>.zip`` under ``uri``.
        archives: digests of zips of user code, which precede the bundle on the path.
        requirements: pip requirements, installed where the image lacks them.
    """

    uri: str
    sha256: str
    archives: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReplicaSpec:
    """One replica to launch.

    Args:
        launch_key: unique per attempt and never reused.
        replica: the replica's number.
        hardware: a name in the backend's catalogue (:mod:`executors.catalogue`).
        region: the backend's name of a region; empty for the executor's default.
        image: a container image; empty for the executor's default.
        timeout_s: the job's deadline; None for the longest that the backend allows, never a
            shorter default of the backend.
        secrets: secrets of this replica only, added to those of the launch.
        options: the backend's options (:class:`executors.backend.Backend`).
    """

    launch_key: str
    replica: int
    hardware: str = "cpu"
    region: str = ""
    spot: bool = False
    timeout_s: float | None = None
    image: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """One job to start. ``env`` includes the variable with the replica number; ``secrets``
    include those of the spec. No name is in both."""

    spec: ReplicaSpec
    entrypoint: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    code: CodeRef | None = None


@dataclass(frozen=True, kw_only=True)
class ReplicaHandle:
    """A job, as JSON. ``data`` belongs to the backend and is opaque to callers."""

    backend: str
    launch_key: str
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """The status of a job. Times are Unix seconds of the backend's clock.

    ``cause``, ``exit_code`` and ``ended_wall_s`` are None until the job has ended.

    Args:
        message: the backend's explanation of the state.
        phase: the backend's name of the state (``Scheduling``, ``Starting``).
        pending: while PENDING, what the job waits for; None if the backend does not report it.
        deadline_wall_s: when the backend will end the job; None if unknown.
        billed_s: billed seconds of an ended job, at the price without spot; None if unknown.
    """

    state: JobState
    cause: Cause | None = None
    exit_code: int | None = None
    message: str = ""
    phase: str = ""
    pending: PendingCause | None = None
    started_wall_s: float | None = None
    ended_wall_s: float | None = None
    deadline_wall_s: float | None = None
    billed_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """A line of a job's output. ``position`` is opaque; pass it as ``logs(after=)`` to continue
    after this line."""

    text: str
    position: str


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A reason why a launch would fail. ``field`` is a field of :class:`ReplicaSpec`, or
    ``credential``."""

    field: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Features and limits of a backend, for the form, the preflight and the control plane.

    Args:
        max_lifetime_s: the longest ``timeout_s``; None for no limit.
        unique_names: two concurrent launches of one key start one job. Otherwise the reaper ends
            the younger job.
    """

    max_lifetime_s: float | None = None
    spot: bool = False
    regions: tuple[str, ...] = ()
    images: bool = True
    unique_names: bool = True
    remote: bool = True
    """Jobs run on other machines and cannot reach a folder or a loopback address of this one."""

    def problems(self, spec: ReplicaSpec) -> list[Problem]:
        """The fields of ``spec`` that the backend cannot satisfy."""
        problems = {}
        limit_s = math.inf if self.max_lifetime_s is None else self.max_lifetime_s
        if spec.timeout_s is not None and not 0 < spec.timeout_s <= limit_s:
            problems["timeout_s"] = (
                f"expected more than 0 and at most {limit_s:.0f} s, found {spec.timeout_s:g} s"
            )
        if spec.spot and not self.spot:
            problems["spot"] = "expected no: the backend has no spot machines"
        if spec.image and not self.images:
            problems["image"] = f"expected none: the backend runs no images, found {spec.image!r}"
        return [Problem(field=field, message=message) for field, message in problems.items()]
