"""What executors share: reading a launch request, naming jobs, waiting, and keeping secrets out of
messages. Nothing here knows a backend."""

from __future__ import annotations

import re
import secrets as random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from executors.base import (
    ExecutorConfig,
    ExecutorError,
    JobState,
    LaunchRefused,
    ReplicaHandle,
    ReplicaSpec,
    ReplicaStatus,
    RetryLater,
)

DEPLOYMENT_LABEL = "archipelago-deployment"
KEY_LABEL = "archipelago-key"
REPLICA_LABEL = "archipelago-replica"

POLL_S = 1.0
"""How often :func:`collect` asks unless told otherwise."""

LAUNCHES_AT_ONCE = 16

_KEY = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_KEY_MUST_BE = (
    "1 to 63 lower-case letters, digits or '-', with a letter or digit at either end "
    "(what every backend takes as a name)"
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A launch as it was asked for: arguments of the entrypoint, the name of the variable that
    carries the replica number, and one spec for each job."""

    args: list[str]
    rank_env: str
    specs: list[ReplicaSpec]

    def environment(
        self,
        spec: ReplicaSpec,
        *,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> tuple[dict[str, str], dict[str, str]]:
        """What is not secret and what is, for the job of ``spec``. A name that is given as both is
        a secret, and a replica's own goes before the launch's."""
        hidden = {**(secrets or {}), **spec.secrets}
        plain = {self.rank_env: str(spec.replica), **(env or {})}
        return {name: value for name, value in plain.items() if name not in hidden}, hidden


def prepare(
    n_replicas: int,
    entrypoint_args: Mapping[str, Any] | None,
    specs: Sequence[ReplicaSpec] | None,
) -> Request:
    """Read the arguments of :meth:`~executors.base.ServerlessExecutor.launch_replicas`.

    Without specs, makes up keys and numbers replicas from 0. Raises :class:`ValueError` for
    arguments nobody knows or another number of specs, :class:`LaunchRefused` for a bad key.
    """
    given = dict(entrypoint_args or {})
    args = [str(arg) for arg in given.pop("args", ())]
    rank_env = str(given.pop("rank_env", "REPLICA_RANK"))
    if given:
        raise ValueError(f"entrypoint_args: expected args and rank_env, found {sorted(given)}")
    if specs is None:
        made = random.token_hex(6)
        specs = [ReplicaSpec(launch_key=f"{made}-{n}", replica=n) for n in range(n_replicas)]
    if len(specs) != n_replicas:
        raise ValueError(f"expected {n_replicas} specs, found {len(specs)}")
    for spec in specs:
        check_launch_key(spec.launch_key)
    keys = [spec.launch_key for spec in specs]
    if len(set(keys)) != len(keys):
        raise ValueError(f"expected a launch key of its own for each spec, found {keys}")
    return Request(args=args, rank_env=rank_env, specs=list(specs))


def check_launch_key(key: str) -> str:
    """The key itself. Raises :class:`LaunchRefused`: one rule for all backends."""
    if not _KEY.fullmatch(key):
        raise LaunchRefused(f"launch key: expected {_KEY_MUST_BE}, found {key!r}")
    return key


def labels_of(config: ExecutorConfig, spec: ReplicaSpec) -> dict[str, str]:
    """The labels or tags of a job: ours say which deployment, launch key and replica it is."""
    return {
        **spec.labels,
        DEPLOYMENT_LABEL: config.deployment,
        KEY_LABEL: spec.launch_key,
        REPLICA_LABEL: str(spec.replica),
    }


def launch_each(
    start: Callable[[ReplicaSpec], ReplicaHandle],
    specs: Sequence[ReplicaSpec],
    *,
    at_once: int = LAUNCHES_AT_ONCE,
) -> list[ReplicaHandle]:
    """``start`` every spec, several at once; the handles in order.

    All are tried. Where some fail, raises the first one's :class:`ExecutorError`: launching the
    same specs again finds the others.
    """
    if len(specs) <= 1:
        return [start(spec) for spec in specs]
    with ThreadPoolExecutor(min(at_once, len(specs)), thread_name_prefix="launch") as pool:
        futures = [pool.submit(start, spec) for spec in specs]
    failed = [error for future in futures if (error := future.exception()) is not None]
    if failed:  # a bug before what a backend said
        raise min(failed, key=lambda error: isinstance(error, ExecutorError))
    return [future.result() for future in futures]


def collect(
    poll: Callable[[Sequence[ReplicaHandle]], list[ReplicaStatus]],
    handles: Sequence[ReplicaHandle],
    timeout: float,
    *,
    every_s: float = POLL_S,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[ReplicaStatus]:
    """Poll until all have ended or ``timeout`` seconds are over; the states then.

    Asks only for those that have not ended: an end is final. A backend that cannot be asked for a
    while (:class:`RetryLater`) is asked again until the time is over, and then that is raised.
    """
    deadline = clock() + timeout
    statuses: dict[int, ReplicaStatus] = {}
    while True:
        left = [
            n
            for n in range(len(handles))
            if n not in statuses or statuses[n].state is not JobState.ENDED
        ]
        try:
            found = poll([handles[n] for n in left]) if left else []
        except RetryLater:
            if clock() >= deadline:
                raise
        else:
            statuses.update(zip(left, found, strict=True))
            if all(status.state is JobState.ENDED for status in found) or clock() >= deadline:
                return [statuses[n] for n in range(len(handles))]
        sleep(max(0.0, min(every_s, deadline - clock())))


def scrub(message: str, secrets: Iterable[str]) -> str:
    """``message`` without the secrets' values: some backends quote what they refuse."""
    for secret in sorted({value for value in secrets if value}, key=len, reverse=True):
        message = message.replace(secret, "***")
    return message
