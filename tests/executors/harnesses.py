"""The harnesses in which the contract suite, ``tests/contracts/test_executor*.py``, runs every
executor.

A harness is a backend under a test's control: an executor that uses the real SDK over a real
connection, and methods that inject the backend's faults. Each is the class ``HARNESS`` of
``tests/executors/<backend>/harness.py``, which takes a folder and is a context manager.

A harness lists the features that it lacks in ``missing``, with reasons; the suite skips nothing
else. Harnesses set short intervals and timeouts, so that tests are fast.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import pytest

from executors import registry
from executors.base import (
    ExecutorConfig,
    JobState,
    ReplicaHandle,
    ReplicaSpec,
    ReplicaStatus,
)
from executors.executor import Executor
from executors.registry import BACKENDS
from tests.emulators.interruptions import Interruption
from tests.matrix import slow_except

HERE = Path(__file__).parent
DEPLOYMENT = "contract"
FAST = ("local", "huggingface")
"""One whose jobs are processes of this machine, and one with a server."""
LIMIT_S = 240.0
"""Upper bound of every wait, for a busy machine; durations are not asserted."""

FEATURES = {
    "server": "stop(), start() and slow(): the backend has a server that can be unavailable",
    "requests": "requests() counts the calls of its API",
    "one_poll": "polling many jobs takes as many requests as polling one",
    "quota": "refuse_quota() makes it refuse launches because of a quota or a payment",
    "preempt": "preempt() reclaims a machine, and the backend reports it",
    "oom": "oom() ends a job out of memory, and the backend reports it",
    "lose": "lose() deletes the record of a job",
    "deadline": "a timeout_s of a few seconds ends a job, and the backend reports it",
    "exit_code": "the backend reports the exit code of a failed job",
    "follow": "lines of a running job are available before its end",
    "impatient": "impatient() returns an executor with a short request timeout",
    "credentials": "a wrong credential is refused",
    "cancel_has_cause": "the backend distinguishes cancelled jobs from failed ones",
    "interrupt": "interrupt() refuses, loses or cuts off one request; incomplete(), left_behind()",
}


class Harness(Protocol):
    """One backend under test."""

    backend: str
    wrong_credentials: Mapping[str, str]
    """Well-formed credentials that no account has."""
    missing: Mapping[str, str]
    """Features that the harness lacks -> the reason."""

    def executor(self, **options: Any) -> Executor:
        """A new instance, as in another process. Keyword arguments are options of its
        :class:`ExecutorConfig`, except ``deployment`` and ``credentials`` (see :func:`config`). It
        accepts hardware ``cpu``."""
        ...

    def impatient(self) -> Executor:
        """An executor with a request timeout of a third of a second."""
        ...

    def description(self, handle: ReplicaHandle) -> str:
        """Everything that a user with read access to the job sees at the backend: command, labels,
        plain environment."""
        ...

    def preempt(self, handle: ReplicaHandle) -> None: ...

    def oom(self, handle: ReplicaHandle) -> None: ...

    def lose(self, handle: ReplicaHandle) -> None: ...

    def stop(self) -> None:
        """Make the server unavailable: it refuses connections."""
        ...

    def start(self) -> None:
        """Make the server available again, at the same address and with its jobs."""
        ...

    def slow(self, seconds: float) -> None:
        """Delay every response by ``seconds`` from now on; 0 for no delay."""
        ...

    def refuse_quota(self, message: str | None) -> None:
        """Refuse launches with this message from now on; None ends it."""
        ...

    def requests(self) -> int: ...

    def interrupt(self, at: int, how: Interruption) -> None:
        """Interrupt request number ``at``, counted from 0 from now on."""
        ...

    def restore(self) -> int:
        """Stop interrupting. Returns the number of requests since :meth:`interrupt`."""
        ...

    def incomplete(self) -> Sequence[str]:
        """Jobs that have not ended and lack an object that they need to start."""
        ...

    def left_behind(self) -> Sequence[str]:
        """Objects that belong to no job, so that no end of a job removes them."""
        ...


def reason_without(backend: str, feature: str) -> str:
    """Why the harness of ``backend`` lacks the feature; empty if it has it."""
    assert feature in FEATURES, f"expected a feature of {', '.join(FEATURES)}, found {feature!r}"
    return harness_class(backend).missing.get(feature, "")


def harness_class(backend: str) -> type[Harness]:
    """``HARNESS`` of the module ``harness``: in ``tests/executors/<backend>`` for a built-in
    backend, beside ``backend.py`` for one of another package."""
    package = registry.DESCRIPTIONS[backend].executor.partition(":")[0].rpartition(".")[0]
    folder = f"tests.executors.{backend}" if package.startswith("executors.") else package
    found: type[Harness] = importlib.import_module(f"{folder}.harness").HARNESS
    return found


def every_harness(*features: str) -> pytest.MarkDecorator:
    """Run a test, by its fixture ``harness``, in every harness with these features. ``make test``
    runs it in :data:`FAST` ones."""
    able = [name for name in BACKENDS if not any(reason_without(name, each) for each in features)]
    fast = [name for name in FAST if name in able] or able[:1]
    return pytest.mark.parametrize("harness", slow_except(fast, able), indirect=True)


@contextlib.contextmanager
def open_harness(backend: str, folder: Path) -> Iterator[Harness]:
    """The harness of ``backend``, with its files in ``folder``."""
    with harness_class(backend)(folder) as harness:  # type: ignore[call-arg, attr-defined]
        yield cast(Harness, harness)


def config(state_dir: Path | None = None, **options: Any) -> ExecutorConfig:
    """A configuration for tests. ``deployment`` and ``credentials`` are its fields, others
    options."""
    own = {name: options.pop(name) for name in ("deployment", "credentials") if name in options}
    return ExecutorConfig(**{"deployment": DEPLOYMENT, **own}, options=options, state_dir=state_dir)


def launch(
    executor: Executor,
    *args: object,
    key: str = "run-0-1",
    replica: int = 0,
    env: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    own_secrets: Mapping[str, str] | None = None,
    **spec: Any,
) -> ReplicaHandle:
    """Launch one job that runs ``tests/executors/replica_stub.py`` with ``args``. ``spec`` holds
    further fields of its :class:`ReplicaSpec`; ``own_secrets`` are the spec's secrets."""
    (handle,) = executor.launch_replicas(
        1,
        "replica_stub",
        {"args": args},
        specs=[ReplicaSpec(launch_key=key, replica=replica, secrets=own_secrets or {}, **spec)],
        env={**stub_env(), **(env or {})},
        secrets=secrets,
    )
    return handle


def stub_env() -> dict[str, str]:
    """Environment in which a job, a process of this machine, finds the stub."""
    return {"PYTHONPATH": str(HERE), "PYTHONUNBUFFERED": "1"}


def end_of(executor: Executor, handle: ReplicaHandle) -> ReplicaStatus:
    """Wait for the end of a job. Returns its status."""
    (status,) = executor.collect([handle], LIMIT_S)
    assert status.state is JobState.ENDED, f"{handle.launch_key} has not ended: {status}"
    return status


def text_of(executor: Executor, handle: ReplicaHandle) -> list[str]:
    return [line.text for line in executor.logs(handle)]


def wait_for(ready: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not ready():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.01)


def wait_for_text(path: Path) -> str:
    """Wait until ``path`` has text, not only until it exists. A process creates a file first."""
    wait_for(lambda: path.exists() and path.read_text() != "", f"text in {path}")
    return path.read_text()


def number_in(path: Path) -> int:
    """Wait for the process id that a stub writes when it is ready."""
    return int(wait_for_text(path))


def is_gone(pid: int) -> bool:
    """Whether the process has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    if not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True
