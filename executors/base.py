"""What every backend does: start replicas, say how they are, show their logs, end them.

An executor keeps no state that matters: a :class:`ReplicaHandle` is plain JSON and works from any
process, and :meth:`ServerlessExecutor.find` recovers it from the *launch key*, the name the
backend knows the job by. Launching one key twice starts one job.

Unknown is not failed: :data:`JobState.UNKNOWN` says that the backend could not be asked.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class ExecutorError(Exception):
    """Base of what an executor raises. The message is the backend's own where it has one."""


class RetryLater(ExecutorError):
    """Trying again can help: the backend is down, slow, or out of capacity."""


class LaunchRefused(ExecutorError):
    """Trying again cannot help until a person changes something."""


class JobState(enum.StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"


class Cause(enum.StrEnum):
    """Why a job ended."""

    DONE = "done"
    ERROR = "error"
    OUT_OF_MEMORY = "out_of_memory"
    PREEMPTED = "preempted"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True)
class ReplicaSpec:
    """One replica to launch. ``launch_key`` is unique per attempt, for ever."""

    launch_key: str
    replica: int


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
    """How a job is. ``cause``, ``exit_code`` and ``ended_wall_s`` are None until it has ended."""

    state: JobState
    cause: Cause | None = None
    exit_code: int | None = None
    message: str = ""
    started_wall_s: float | None = None
    ended_wall_s: float | None = None


class ServerlessExecutor(Protocol):
    """One backend. Errors are :class:`RetryLater` or :class:`LaunchRefused`."""

    backend: str

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str,
        entrypoint_args: Mapping[str, Any] | None = None,
        *,
        specs: Sequence[ReplicaSpec] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[ReplicaHandle]:
        """Start ``n_replicas`` jobs that run ``python -m entrypoint``.

        ``entrypoint_args``: ``args`` is a list of command-line arguments, ``rank_env`` names the
        environment variable that carries the replica number (default ``REPLICA_RANK``). ``specs``
        names each job; without it keys are made up and replicas are numbered from 0. A key that
        was launched before gives the handle of that job, whether it still runs or not.
        """
        ...

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """The state of each, in order; one question to the backend for many jobs."""
        ...

    def find(self, launch_key: str) -> ReplicaHandle | None:
        """The job of that key, or None if there never was one."""
        ...

    def logs(self, handle: ReplicaHandle, *, follow: bool = False) -> Iterator[str]:
        """Lines of the job's output, oldest first; with ``follow`` until the job ends."""
        ...

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        """Ask each job to end, then end it. A job that has ended already is no error."""
        ...

    def collect(self, handles: Sequence[ReplicaHandle], timeout: float) -> list[ReplicaStatus]:
        """Wait up to ``timeout`` seconds for all to end; the states then."""
        ...
