"""Code shared by all executors: launch keys, labels, waiting, exit codes, ``Retry-After`` headers,
and removing secrets from messages. Independent of any backend."""

from __future__ import annotations

import datetime
import email.utils
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from executors import options as declared
from executors.base import (
    Cause,
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
"""Default interval of :func:`collect`."""

CALLS_AT_ONCE = 16

T = TypeVar("T")
R = TypeVar("R")

_KEY = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_KEY_RULE = (
    "1 to 63 lower-case letters, digits or '-', with a letter or digit at either end "
    "(valid as a name on every backend)"
)


def check_launch_key(key: str) -> str:
    """Return the key. Raises :class:`LaunchRefused`; the rule is the same for all backends."""
    if not _KEY.fullmatch(key):
        raise LaunchRefused(f"launch key: expected {_KEY_RULE}, found {key!r}")
    return key


def job_options(options: type[T], of_executor: Mapping[str, Any], of_spec: Mapping[str, Any]) -> T:
    """The options of one job. Raises :class:`LaunchRefused`."""
    try:
        return declared.read(options, of_executor, of_spec)
    except ValueError as error:
        raise LaunchRefused(str(error)) from error


def labels_of(config: ExecutorConfig, spec: ReplicaSpec) -> dict[str, str]:
    """The labels or tags of a job: the spec's, then deployment, launch key and replica."""
    return {
        **spec.labels,
        DEPLOYMENT_LABEL: config.deployment,
        KEY_LABEL: spec.launch_key,
        REPLICA_LABEL: str(spec.replica),
    }


def call_each(call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Call ``call`` for every item, several at once. Returns the results in order.

    All are tried. If some fail, the first :class:`ExecutorError` is raised.
    """
    listed = list(items)
    if len(listed) <= 1:
        return [call(item) for item in listed]
    with ThreadPoolExecutor(min(CALLS_AT_ONCE, len(listed)), thread_name_prefix="backend") as pool:
        futures = [pool.submit(call, item) for item in listed]
    failed = [error for future in futures if (error := future.exception()) is not None]
    if failed:  # an unexpected exception takes precedence over an error of a backend
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
    """Poll until all jobs have ended or ``timeout`` seconds have passed. Returns the last states.

    Jobs that have ended are not polled again. :class:`RetryLater` is raised only if the backend is
    still unavailable at the timeout.
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
            polled = poll([handles[n] for n in left]) if left else []
        except RetryLater:
            if clock() >= deadline:
                raise
        else:
            statuses.update(zip(left, polled, strict=True))
            if all(status.state is JobState.ENDED for status in polled) or clock() >= deadline:
                return [statuses[n] for n in range(len(handles))]
        sleep(max(0.0, min(every_s, deadline - clock())))


def scrub(message: str, secrets: Iterable[str]) -> str:
    """Replace the values of secrets in ``message``: some backends quote a refused request. Values
    of one or two characters stay: replacing them would make the message unreadable."""
    for secret in sorted({value for value in secrets if len(value) > 2}, key=len, reverse=True):
        message = message.replace(secret, "***")
    return message


EX_TEMPFAIL, EX_CONFIG = 75, 78
"""Exit codes of ``sysexits.h`` that replicas use: try again later; a restart changes nothing."""
SIGKILL_EXIT, SIGTERM_EXIT = 128 + 9, 128 + 15

_EXIT_MEANINGS = {
    EX_TEMPFAIL: "temporary failure; another attempt can succeed",
    EX_CONFIG: "configuration error; a restart does not help",
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
    """Classify the end of a job: its cause and an explanation. The same rule for all backends.

    The backend's reports take precedence, in this order: cancelled, preempted, deadline, out of
    memory. Otherwise exit code 0 means done and any other code an error. 137 (SIGKILL) counts as
    out of memory only if the backend reports that, because a manual kill has the same code. 143
    (SIGTERM) is an error: a backend that ends a job reports the reason.

    Args:
        exit_code: 128 + n for signal n, as in a shell; -n (Python's form) is accepted.
        out_of_memory: whether the backend reports an out-of-memory kill (``OOMKilled``); None
            where the backend does not report such kills.
    """
    code = exit_code if exit_code is None or exit_code >= 0 else 128 - exit_code
    if cancelled:
        return Cause.CANCELLED, "cancelled"
    if preempted:
        return Cause.PREEMPTED, "preempted: the backend took the machine away"
    if deadline:
        return Cause.DEADLINE, "the job reached its deadline"
    if out_of_memory:
        return Cause.OUT_OF_MEMORY, "out of memory: above its own limit or the machine's memory"
    if code is None:
        return Cause.ERROR, "ended without an exit code"
    if code == 0:
        return Cause.DONE, ""
    message = f"ended with exit code {code}"
    meaning = _EXIT_MEANINGS.get(code, "")
    if code == SIGKILL_EXIT:
        meaning = (
            "killed with SIGKILL; the backend does not report out-of-memory kills"
            if out_of_memory is None
            else "killed with SIGKILL, not an out-of-memory kill"
        )
    return Cause.ERROR, f"{message} ({meaning})" if meaning else message


def retry_after_s(value: object, *, now: Callable[[], float] = time.time) -> float | None:
    """Seconds of a ``Retry-After`` header; None if it is missing or malformed.

    Accepts both forms: a number of seconds, and an HTTP date (0 for a date in the past).
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
"""Upper bound of :func:`retry_after_s`: a longer wait is shortened to an hour."""
