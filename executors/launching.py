"""What executors share: reading a launch request, naming jobs, waiting, exit codes, ``Retry-After``
and keeping secrets out of messages. Nothing here knows a backend."""

from __future__ import annotations

import datetime
import email.utils
import re
import secrets as random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from executors.base import (
    Cause,
    CodeRef,
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


def prepare(specs: Sequence[ReplicaSpec], entrypoint_args: Mapping[str, Any] | None) -> Request:
    """Read the arguments of :meth:`~executors.base.ServerlessExecutor.ensure`.

    Raises :class:`ValueError` for unknown arguments or a launch key that is given twice,
    :class:`LaunchRefused` for a malformed key.
    """
    given = dict(entrypoint_args or {})
    args = [str(arg) for arg in given.pop("args", ())]
    rank_env = str(given.pop("rank_env", "REPLICA_RANK"))
    if given:
        raise ValueError(f"entrypoint_args: expected args and rank_env, found {sorted(given)}")
    keys = [check_launch_key(spec.launch_key) for spec in specs]
    if len(set(keys)) != len(keys):
        raise ValueError(f"expected a launch key of its own for each spec, found {keys}")
    return Request(args=args, rank_env=rank_env, specs=list(specs))


def new_specs(n_replicas: int) -> list[ReplicaSpec]:
    """Specs with new launch keys, numbered from 0."""
    made = random.token_hex(6)
    return [ReplicaSpec(launch_key=f"{made}-{n}", replica=n) for n in range(n_replicas)]


class LaunchReplicas:
    """:meth:`~executors.base.ServerlessExecutor.launch_replicas` for every executor: ``ensure``
    with specs that are given or made."""

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
        """See :meth:`executors.base.ServerlessExecutor.ensure`."""
        raise NotImplementedError

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
        """See :meth:`executors.base.ServerlessExecutor.launch_replicas`. Raises
        :class:`ValueError` where the number of specs is not ``n_replicas``."""
        specs = new_specs(n_replicas) if specs is None else specs
        if len(specs) != n_replicas:
            raise ValueError(f"expected {n_replicas} specs, found {len(specs)}")
        return self.ensure(specs, entrypoint, entrypoint_args, env=env, secrets=secrets, code=code)


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


EX_TEMPFAIL, EX_CONFIG = 75, 78
"""Exit codes of ``sysexits.h`` that replicas use: try again later; a restart changes nothing."""
SIGKILL_EXIT, SIGTERM_EXIT = 128 + 9, 128 + 15

_EXIT_MEANINGS = {
    EX_TEMPFAIL: "it gave up for now; another attempt can succeed",
    EX_CONFIG: "a configuration error, which a restart does not change",
    127: "command not found",
    SIGTERM_EXIT: "ended by SIGTERM",
}


def exit_cause(
    exit_code: int | None,
    *,
    out_of_memory: bool | None = None,
    cancelled: bool = False,
    preempted: bool = False,
    deadline: bool = False,
) -> tuple[Cause, str]:
    """The cause of an end and its explanation, by one rule for all backends.

    The backend's own reports go first, in this order: cancelled on request, preempted, deadline,
    out of memory. ``out_of_memory`` is True or False where the backend reports kills for lack of
    memory (``OOMKilled``), and None where it cannot tell. Then the exit code decides: 0 is done;
    everything else is an error. In particular 137 (SIGKILL) is out of memory *only* if the backend
    reports so: a process that was killed by hand ends alike. 143 (SIGTERM) is an error too: a
    backend that ends a job itself reports why.

    ``exit_code`` counts signals as a shell does (128 + n); -n, Python's form, is the same.
    """
    code = exit_code if exit_code is None or exit_code >= 0 else 128 - exit_code
    if cancelled:
        return Cause.CANCELLED, "cancelled"
    if preempted:
        return Cause.PREEMPTED, "preempted: the backend took the machine away"
    if deadline:
        return Cause.DEADLINE, "the job reached its deadline"
    if out_of_memory:
        return Cause.OUT_OF_MEMORY, "out of memory: it used more than its limit, or its machine had"
    if code is None:
        return Cause.ERROR, "ended without an exit code"
    if code == 0:
        return Cause.DONE, ""
    message = f"ended with exit code {code}"
    meaning = _EXIT_MEANINGS.get(code, "")
    if code == SIGKILL_EXIT:
        meaning = (
            "killed with SIGKILL; the backend does not report whether for lack of memory"
            if out_of_memory is None
            else "killed with SIGKILL, not for lack of memory"
        )
    return Cause.ERROR, f"{message} ({meaning})" if meaning else message


def retry_after_s(value: object, *, now: Callable[[], float] = time.time) -> float | None:
    """Seconds that a ``Retry-After`` header asks to wait; None where there is none to be read.

    Both forms: a number of seconds, or an HTTP date (a date in the past is 0).
    https://www.rfc-editor.org/rfc/rfc9110#field.retry-after
    """
    text = str(value or "").strip()
    if text.isascii() and text.isdigit():
        return min(float(text), RETRY_AFTER_CAP_S)
    try:
        at = email.utils.parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=datetime.UTC)
    return min(max(at.timestamp() - now(), 0.0), RETRY_AFTER_CAP_S)


RETRY_AFTER_CAP_S = 3600.0
"""A server that asks for more is asked again after an hour."""
