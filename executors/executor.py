"""The base class of all backends: start replicas, report their state, read their logs, end them.

An executor keeps no essential state: :meth:`Executor.find` recovers a handle from the launch key,
and a repeated :meth:`Executor.ensure` with the same key completes that job and never starts a
second one.
"""

from __future__ import annotations

import secrets as random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from executors.base import (
    Capabilities,
    CodeRef,
    ExecutorError,
    JobRequest,
    LaunchRefused,
    LogLine,
    Problem,
    ReplicaHandle,
    ReplicaSpec,
    ReplicaStatus,
)
from executors.launching import POLL_S, call_each, check_launch_key, collect, scrub


class Executor(ABC):
    """One backend. Methods raise :class:`~executors.base.RetryLater`,
    :class:`~executors.base.LaunchRefused` or :class:`~executors.base.AccountError`, and are
    thread-safe.

    A subclass implements the abstract methods, and :meth:`start`, or :meth:`start_all` where jobs
    are better started together. Its constructor takes an :class:`~executors.base.ExecutorConfig`.
    """

    backend: str
    capabilities: Capabilities
    poll_s: float = POLL_S
    """Seconds between two polls of :meth:`collect`."""

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
        """Create all objects of each spec's job: a job that runs ``python -m entrypoint``, and its
        dependencies (a Secret, labels, owner references).

        Idempotent under the launch key. Callers repeat it until it returns: after a crash, an error
        or a lost response at any request, the next call creates the missing objects and creates
        nothing twice. An ended job is left unchanged and its handle returned. Only a return
        guarantees that all objects exist; :meth:`find` can return an incomplete job.

        All specs are tried. If some fail, the first error is raised; repeat the call with the same
        specs.

        Args:
            entrypoint_args: ``args`` is a list of command-line arguments; ``rank_env`` names the
                environment variable for the replica number (default ``REPLICA_RANK``).
            env: environment variables that are not secret.
            secrets: environment variables that the backend transports as secrets, never in
                arguments, labels or handles.
            code: code that the job fetches and verifies first (:mod:`executors.bootstrap.command`).
                Without it the image must contain the module.

        Raises:
            RetryLater: the backend is unavailable. :class:`~executors.base.NoCapacity`: its quota
                is in use or no machine is free; a later call can succeed without intervention.
            AccountError: a credential, a permission, a namespace or a quota above zero is missing.
            LaunchRefused: the request is invalid. No message and no cause contains a secret.
        """
        jobs = job_requests(specs, entrypoint, entrypoint_args, env=env, secrets=secrets, code=code)
        hidden = [value for job in jobs for value in job.secrets.values()]
        try:
            return self.start_all(jobs)
        except ExecutorError as error:
            if hidden:
                error.args = (scrub(str(error), hidden),)
                raise error from None  # a traceback would print the cause
            raise

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str,
        entrypoint_args: Mapping[str, Any] | None = None,
        *,
        specs: Sequence[ReplicaSpec] | None = None,
        **request: Any,
    ) -> list[ReplicaHandle]:
        """:meth:`ensure` for callers without launch keys: without ``specs``, new keys are generated
        and replicas numbered from 0. ``request`` holds the other keywords of :meth:`ensure`.

        Raises :class:`ValueError` where the number of specs is not ``n_replicas``.
        """
        specs = new_specs(n_replicas) if specs is None else specs
        if len(specs) != n_replicas:
            raise ValueError(f"expected {n_replicas} specs, found {len(specs)}")
        return self.ensure(specs, entrypoint, entrypoint_args, **request)

    def start_all(self, jobs: Sequence[JobRequest]) -> list[ReplicaHandle]:
        return call_each(self.start, jobs)

    def start(self, job: JobRequest) -> ReplicaHandle:
        """Bring every object of one job to the wanted state; idempotent under its launch key."""
        raise NotImplementedError

    @abstractmethod
    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """The status of each job, in order, with as few requests as the backend allows.

        A job without a record at the backend is ENDED with cause LOST.
        """

    @abstractmethod
    def find(self, launch_key: str) -> ReplicaHandle | None:
        """The job of that key, ended or not; None if it does not exist. Read-only: the job can lack
        an object, which :meth:`ensure` creates."""

    @abstractmethod
    def live(self) -> list[ReplicaHandle]:
        """Every job of the deployment that has not ended, for the reaper."""

    @abstractmethod
    def logs(
        self, handle: ReplicaHandle, *, after: str = "", follow: bool = False
    ) -> Iterator[LogLine]:
        """The job's output after the position ``after``, oldest line first; with ``follow`` until
        the job ends."""

    @abstractmethod
    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        """End each job with its grace period, without waiting. Ended and unknown jobs are no error.
        All are tried before an error is raised."""

    def collect(self, handles: Sequence[ReplicaHandle], timeout: float) -> list[ReplicaStatus]:
        """Wait up to ``timeout`` seconds for all jobs to end. Returns the last statuses."""
        return collect(self.poll, handles, timeout, every_s=self.poll_s)

    @abstractmethod
    def check(self) -> str:
        """Account, workspace or cluster of the credential, for display.

        Raises an :class:`~executors.base.ExecutorError` if the credential does not work.
        """

    def problems(self, spec: ReplicaSpec) -> list[Problem]:
        """Errors of ``spec`` that show without a request to the backend."""
        return self.capabilities.problems(spec)

    def check_spec(self, spec: ReplicaSpec) -> None:
        """Raise :class:`~executors.base.LaunchRefused` for a spec with :meth:`problems`."""
        if found := self.problems(spec):
            raise LaunchRefused("; ".join(f"{each.field}: {each.message}" for each in found))

    @abstractmethod
    def preflight(self, spec: ReplicaSpec, count: int) -> list[Problem]:
        """Reasons why launching ``count`` replicas of ``spec`` would fail, as far as the backend
        reports them without a launch."""


def job_requests(
    specs: Sequence[ReplicaSpec],
    entrypoint: str,
    entrypoint_args: Mapping[str, Any] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    code: CodeRef | None = None,
) -> list[JobRequest]:
    """One request per spec from the arguments of :meth:`Executor.ensure`.

    A name in both ``env`` and ``secrets`` is a secret. A spec's own secret replaces the launch's.

    Raises:
        ValueError: unknown entrypoint arguments, or a launch key that occurs twice.
        LaunchRefused: a malformed launch key.
    """
    given = dict(entrypoint_args or {})
    args = [str(arg) for arg in given.pop("args", ())]
    rank_env = str(given.pop("rank_env", "REPLICA_RANK"))
    if given:
        raise ValueError(f"entrypoint_args: expected args and rank_env, found {sorted(given)}")
    keys = [check_launch_key(spec.launch_key) for spec in specs]
    if len(set(keys)) != len(keys):
        raise ValueError(f"expected a different launch key for each spec, found {keys}")
    requests = []
    for spec in specs:
        hidden = {**(secrets or {}), **spec.secrets}
        plain = {rank_env: str(spec.replica), **(env or {})}
        requests.append(
            JobRequest(
                spec=spec,
                entrypoint=entrypoint,
                args=args,
                env={name: value for name, value in plain.items() if name not in hidden},
                secrets=hidden,
                code=code,
            )
        )
    return requests


def new_specs(n_replicas: int) -> list[ReplicaSpec]:
    """Specs with new launch keys, numbered from 0."""
    prefix = random.token_hex(6)
    return [ReplicaSpec(launch_key=f"{prefix}-{n}", replica=n) for n in range(n_replicas)]
