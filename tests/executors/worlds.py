"""The worlds that one suite, ``tests/contracts/test_executor*.py``, runs every executor in.

A world is a backend in the test's hands: an executor that talks to it by the real SDK over a real
connection, and means to make go wrong what goes wrong there. Each lives in
``tests/executors/<backend>_world.py``, as a class that takes a folder and is a context manager.
It is imported only when a test asks for it.

What a world cannot do stands in :data:`EXCEPTIONS`, with the reason; nothing else is left out.
Each tells its executor to look often and to wait briefly, so that tests are quick.
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

from executors.base import (
    ExecutorConfig,
    JobState,
    ReplicaHandle,
    ReplicaSpec,
    ReplicaStatus,
    ServerlessExecutor,
)
from executors.registry import BACKENDS
from tests.emulators.interruptions import Interruption

HERE = Path(__file__).parent
DEPLOYMENT = "contract"
LIMIT_S = 60.0
"""Within which what is waited for happens on a busy machine; nothing is timed."""

_CLASSES = {
    "local": "local.world:LocalWorld",
    "modal": "modal.world:ModalWorld",
    "huggingface": "huggingface.world:HuggingFaceWorld",
    "sagemaker": "sagemaker.world:SageMakerWorld",
    "kubernetes": "kubernetes.world:KubernetesWorld",
}
assert list(_CLASSES) == list(BACKENDS), "every backend has a world"

FEATURES = {
    "server": "stop(), start() and slow(): there is a server that can be away",
    "requests": "requests() counts the calls of its API",
    "one_poll": "many jobs are polled by as many requests as one",
    "quota": "refuse_quota() makes it refuse launches for want of a quota or a payment",
    "preempt": "preempt() takes a machine away, and the backend says so",
    "oom": "oom() ends a job for want of memory, and the backend says so",
    "lose": "lose() makes the record of a job vanish",
    "deadline": "timeout_s of a few seconds ends a job, and the backend says so",
    "exit_code": "the exit code of a job that failed is told",
    "follow": "lines of a running job are seen before it ends",
    "impatient": "impatient() makes an executor that does not wait for slow answers",
    "credentials": "a wrong credential is refused",
    "cancel_is_told": "a job that was cancelled is told from one that failed",
    "interrupt": "interrupt() refuses, loses or cuts off one request; incomplete(), left_behind()",
}

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("local", "server"): "processes of this machine: no server is asked",
    ("local", "impatient"): "processes of this machine: no server is asked",
    ("local", "requests"): "processes of this machine: no server is asked",
    ("local", "one_poll"): "processes of this machine: no server is asked",
    ("local", "quota"): "nobody grants processes of one's own machine",
    ("local", "preempt"): "nobody takes one's own machine away",
    ("local", "oom"): "a process ends so by itself: test_local_limits.py has one that does",
    ("local", "credentials"): "processes of this machine need none",
    ("local", "interrupt"): "processes of this machine: no server is asked",
}


class World(Protocol):
    """One backend."""

    backend: str
    wrong_credentials: Mapping[str, str]
    """Well-formed, and nobody's."""

    def executor(self, **options: Any) -> ServerlessExecutor:
        """A new instance every time, as another process would have. Keyword arguments are options
        of its :class:`ExecutorConfig`, except ``deployment`` and ``credentials`` (see
        :func:`config`). It takes hardware ``cpu``."""
        ...

    def impatient(self) -> ServerlessExecutor:
        """One that gives an answer up after a second or so."""
        ...

    def description(self, handle: ReplicaHandle) -> str:
        """All that a person who may look at the job sees of it at the backend: command, labels,
        plain environment."""
        ...

    def preempt(self, handle: ReplicaHandle) -> None: ...

    def oom(self, handle: ReplicaHandle) -> None: ...

    def lose(self, handle: ReplicaHandle) -> None: ...

    def stop(self) -> None:
        """The server is away: connections are refused."""
        ...

    def start(self) -> None:
        """It is there again, at the same address, and knows its jobs."""
        ...

    def slow(self, seconds: float) -> None:
        """Each answer takes so long from now on; 0 for at once."""
        ...

    def refuse_quota(self, message: str | None) -> None:
        """Launches are refused with this message from now on; None for no longer."""
        ...

    def requests(self) -> int: ...

    def interrupt(self, at: int, how: Interruption) -> None:
        """Interrupt request number ``at``, counted from 0 from now on."""
        ...

    def restore(self) -> int:
        """Interrupt nothing any more; how many requests arrived since :meth:`interrupt`."""
        ...

    def incomplete(self) -> Sequence[str]:
        """Jobs, not ended, that lack an object which they need to start."""
        ...

    def left_behind(self) -> Sequence[str]:
        """Objects, other than jobs, that belong to no job: no end of a job removes them."""
        ...


def why_not(backend: str, feature: str) -> str:
    """Why ``backend`` cannot do that; empty where it can."""
    assert feature in FEATURES, f"expected a feature of {', '.join(FEATURES)}, found {feature!r}"
    return EXCEPTIONS.get((backend, feature), "")


def present() -> list[str]:
    """Backends whose world is there."""
    return [
        name
        for name, (module, *_) in _parts().items()
        if (HERE / f"{module.replace('.', '/')}.py").exists()
    ]


def _parts() -> dict[str, list[str]]:
    return {backend: path.split(":") for backend, path in _CLASSES.items()}


def every_world(*features: str) -> pytest.MarkDecorator:
    """Runs a test, by its fixture ``world``, in every world that can do ``features``."""
    able = [name for name in present() if not any(why_not(name, what) for what in features)]
    return pytest.mark.parametrize("world", able, indirect=True)


@contextlib.contextmanager
def open_world(backend: str, folder: Path) -> Iterator[World]:
    """The world of ``backend``, with its files in ``folder``."""
    module, name = _parts()[backend]
    made = getattr(importlib.import_module(f"tests.executors.{module}"), name)
    with made(folder) as world:
        yield cast(World, world)


def config(state_dir: Path | None = None, **options: Any) -> ExecutorConfig:
    """A configuration of these tests. Options named as fields of the configuration are those."""
    own = {name: options.pop(name) for name in ("deployment", "credentials") if name in options}
    return ExecutorConfig(**{"deployment": DEPLOYMENT, **own}, options=options, state_dir=state_dir)


def launch(
    executor: ServerlessExecutor,
    *args: object,
    key: str = "run-0-1",
    replica: int = 0,
    env: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    own_secrets: Mapping[str, str] | None = None,
    **spec: Any,
) -> ReplicaHandle:
    """One job that runs ``tests/executors/replica_stub.py`` with ``args``; ``spec`` are further
    fields of its :class:`ReplicaSpec`, whose secrets are ``own_secrets``."""
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
    """What a job needs to find the stub: it runs on this machine after all."""
    return {"PYTHONPATH": str(HERE), "PYTHONUNBUFFERED": "1"}


def end_of(executor: ServerlessExecutor, handle: ReplicaHandle) -> ReplicaStatus:
    """How the job has ended, waited for."""
    (status,) = executor.collect([handle], LIMIT_S)
    assert status.state is JobState.ENDED, f"{handle.launch_key} goes on: {status}"
    return status


def text_of(executor: ServerlessExecutor, handle: ReplicaHandle) -> list[str]:
    return [line.text for line in executor.logs(handle)]


def wait_for(ready: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not ready():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


def number_in(path: Path) -> int:
    """The process id a stub leaves once it is ready."""
    wait_for(lambda: path.exists() and path.read_text(), str(path))
    return int(path.read_text())


def is_gone(pid: int) -> bool:
    """Whether no process of that number runs any more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    if not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True
