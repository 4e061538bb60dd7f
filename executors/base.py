"""What every backend does: start replicas, report their state, show their logs, end them.

An executor keeps no state that matters: a :class:`ReplicaHandle` is plain JSON and works from any
process, and :meth:`ServerlessExecutor.find` recovers it from the *launch key*, the name the
backend knows the job by. :meth:`ServerlessExecutor.ensure` starts a job; repeating it under the
same key completes that job and never starts a second one.

Unknown is not failed: :data:`JobState.UNKNOWN` says that the backend could not be asked.

Errors say what helps: :class:`RetryLater` waiting, :class:`NeedsPerson` somebody who changes a
credential, a quota or a bill, :class:`LaunchRefused` nothing but another request.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class ExecutorError(Exception):
    """Base of what an executor raises. The message is the backend's own where it has one."""


class RetryLater(ExecutorError):
    """Trying again can help: the backend is down, slow, or out of capacity.

    ``after_s``: how long the backend asked us to wait, None where it did not say. ``attempts``: how
    many launches in a row are attempted before intervention is required, None for no limit; set
    where the backend's message does not show whether waiting helps.
    """

    def __init__(
        self, message: str, *, after_s: float | None = None, attempts: int | None = None
    ) -> None:
        super().__init__(message)
        self.after_s = after_s
        self.attempts = attempts


class NoCapacity(RetryLater):
    """The backend is full for now: the account's quota is in use, no machine is free, or a disk is
    full. It says nothing about the request; a launch is repeated until there is room.

    ``pending`` is what the launch waits for, by default the quota.

    A quota that cannot hold the request even when nothing else runs (a limit of zero) is
    :class:`NeedsPerson` instead."""

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
    """Trying again cannot help: what was asked for is wrong."""


class NeedsPerson(LaunchRefused):
    """No request of this account can succeed until a person acts: a credential is wrong or has
    expired, a permission, a quota or a payment is missing."""


class JobState(enum.StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"


class PendingCause(enum.StrEnum):
    """Why a job has not started yet. It decides how long the control plane waits, and what it does
    next (:func:`runs.reconcile.retry_policy.pending_limit_s`)."""

    STARTING = "starting"
    """A machine boots, or an image is being pulled: normal."""
    QUEUED = "queued"
    """A queue has not admitted it (Kueue). It waits without a limit: the queue's owner decides."""
    CAPACITY = "capacity"
    """No machine is free, or none matches what is asked for."""
    QUOTA = "quota"
    """The quota is in use by others."""
    IMAGE = "image"
    """The image cannot be pulled, or its name is invalid."""
    INCOMPLETE = "incomplete"
    """An object that it needs (a Secret, a ConfigMap, a volume) is missing: ``ensure`` again."""
    REFUSED = "refused"
    """The backend refuses it until an operator changes something: a quota below the request, a
    security policy, a missing service account."""


class Cause(enum.StrEnum):
    """Why a job ended."""

    DONE = "done"
    ERROR = "error"
    OUT_OF_MEMORY = "out_of_memory"
    PREEMPTED = "preempted"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    LOST = "lost"
    """The backend knows no such job (any more)."""


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """What one executor works with. Two executors of one configuration see the same jobs.

    ``deployment`` marks our jobs among others of the account, so that no control plane takes
    another's for orphans. ``credentials`` are named as the backend's own environment variables
    (``MODAL_TOKEN_ID``); where one is missing the SDK finds its own in this process's environment.
    ``options`` are the backend's own and documented by its executor. ``state_dir`` is where local
    jobs keep their files.
    """

    deployment: str = "archipelago"
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    state_dir: Path | None = None


@dataclass(frozen=True, kw_only=True)
class CodeRef:
    """The code a replica runs, in its rendezvous: see :mod:`executors.bootstrap.command`.

    ``sha256`` names ``code/<sha256>.zip`` under ``uri``. ``archives`` are further zips of user code
    by digest, put on the path before it. ``requirements`` are pip requirements, installed where the
    image lacks them.
    """

    uri: str
    sha256: str
    archives: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReplicaSpec:
    """One replica to launch. ``launch_key`` is unique per attempt, for ever.

    ``hardware`` is a name in the backend's catalogue (:mod:`executors.catalogue`), ``region`` and
    ``image`` the backend's words, empty for the executor's default. ``timeout_s`` is the deadline
    the backend is given; None means the longest it allows, never a shorter default of its own.
    ``secrets`` are this replica's alone, added to those of the whole launch. ``options`` are the
    backend's own and documented by its executor.
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
class ReplicaHandle:
    """A job, as JSON. ``data`` is the backend's own and opaque to everybody else."""

    backend: str
    launch_key: str
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ReplicaHandle:
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """How a job is. ``cause``, ``exit_code`` and ``ended_wall_s`` are None until it has ended.

    ``pending``: while the state is PENDING, what the job waits for; None where the backend does
    not say. ``message`` is then the backend's own explanation. ``phase`` is the backend's own word
    (``Scheduling``, ``Starting``). Times are Unix seconds of the backend's clock, for display and
    billing. ``deadline_wall_s`` is when the backend will end the job, None where that is not known.
    ``billed_s`` is how many seconds at the price without spot the backend bills for a job that has
    ended, None where it does not say.
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
    """A line of a job's output. ``position`` is opaque: what ``logs(after=)`` takes to go on
    behind this line."""

    text: str
    position: str


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend can do; the form, the preflight and the control plane ask here.

    ``max_lifetime_s`` is the longest ``timeout_s`` it takes, None for no limit. ``unique_names``:
    launching one key twice at once starts one job; without it the reaper ends the younger.
    """

    max_lifetime_s: float | None = None
    spot: bool = False
    regions: tuple[str, ...] = ()
    images: bool = True
    unique_names: bool = True
    remote: bool = True
    """Jobs run on other machines: they cannot reach a folder or a loopback address of this one."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a launch would fail of. ``field`` is the part of :class:`ReplicaSpec` it is about, or
    ``credential``."""

    field: str
    message: str


class ServerlessExecutor(Protocol):
    """One backend. Errors are :class:`RetryLater`, :class:`LaunchRefused` or
    :class:`NeedsPerson`; methods may be called from several threads."""

    backend: str
    capabilities: Capabilities

    def ensure(
        self,
        specs: Sequence[ReplicaSpec],
        entrypoint: str,
        entrypoint_args: Mapping[str, Any] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        code: CodeRef | None = None,
    ) -> list[ReplicaHandle]:
        """Bring every object of each spec's job to the wanted state: a job that runs ``python -m
        entrypoint``, and whatever it needs to start (a Secret, labels, owner references).

        Idempotent under the launch key. A caller repeats it until it returns: after a kill, an
        error or a lost answer at any request the next call completes what is missing, and creates
        nothing twice. A job that has ended is left as it is; its handle is returned. Only a return
        means that all objects exist: :meth:`find` can find a job that lacks some.

        ``entrypoint_args``: ``args`` is a list of command-line arguments, ``rank_env`` names the
        environment variable that carries the replica number (default ``REPLICA_RANK``).

        ``env`` is not secret. ``secrets`` become environment variables too, by the backend's own
        means for secrets: never in arguments, labels or handles. With ``code`` the job fetches and
        checks that first (:mod:`executors.bootstrap.command`); without, the image has the module.

        All specs are tried. Where some fail, the first one's error is raised; repeat the call with
        the same specs.

        Raises:
            RetryLater: the backend is away. :class:`NoCapacity`: its quota is in use, or no
                machine is free; a later call can succeed without anyone's action.
            NeedsPerson: a credential, a permission, a namespace or a quota above zero is missing.
            LaunchRefused: the request itself is wrong.
        """
        ...

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str,
        entrypoint_args: Mapping[str, Any] | None = None,
        *,
        specs: Sequence[ReplicaSpec] | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        code: CodeRef | None = None,
    ) -> list[ReplicaHandle]:
        """:meth:`ensure` for callers without launch keys: without ``specs``, new keys are made and
        replicas are numbered from 0. Implemented by :class:`executors.launching.LaunchReplicas`.
        """
        ...

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """The state of each, in order; as few questions to the backend as it allows for many.

        A job the backend does not know (any more) is ENDED with cause LOST.
        """
        ...

    def find(self, launch_key: str) -> ReplicaHandle | None:
        """The job of that key, ended or not, or None if there never was one. Only reads; a job
        that is found can lack an object, which :meth:`ensure` then creates."""
        ...

    def live(self) -> list[ReplicaHandle]:
        """Every job of our deployment that has not ended, for the reaper."""
        ...

    def logs(
        self, handle: ReplicaHandle, *, after: str = "", follow: bool = False
    ) -> Iterator[LogLine]:
        """The job's output, oldest line first, behind the position ``after``; with ``follow``
        until the job ends."""
        ...

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        """Ask each job to end, then end it; does not wait. One that has ended, or that nobody
        knows, is no error."""
        ...

    def collect(self, handles: Sequence[ReplicaHandle], timeout: float) -> list[ReplicaStatus]:
        """Wait up to ``timeout`` seconds for all to end; the states then."""
        ...

    def check(self) -> str:
        """Who and where we are to the backend (account, workspace, cluster), for a person.

        Raises what the backend says where the credential does not work.
        """
        ...

    def preflight(self, spec: ReplicaSpec, count: int) -> list[Problem]:
        """What launching ``count`` of ``spec`` would fail of, as far as the backend tells without
        starting anything; empty when nothing is known to be wrong."""
        ...
