"""Replicas as processes of this machine.

::

    root/<launch_key>/lock         flock, held by the job's shim: held means alive
                      handle.json  who the shim is (pid, start time, boot); its first act
                      log          what the replica printed
                      cancel       somebody asked for the end
                      exit.json    how it ended; the shim's last act

A launcher takes the lock and hands it to a *shim* (:mod:`executors.local_shim`) in a session of its
own, which starts the replica and outlives the launcher. Whoever finds the lock taken finds
the job; so a key launched twice, at once or after a launcher was killed between *start* and *save*,
starts one job, and any process can ask about it. A process is signalled only while the lock is
held and its start time is the recorded one, so a reused process id never is.

``cancel`` does not wait: the shim sends SIGTERM to the replica's process group and, when
``grace_s`` is over, SIGKILL. A shim that is itself killed takes the replica with it on Linux;
elsewhere the replica lives on unobserved. Processes that a replica puts into a group or
session of their own are not followed.

Left out: limits on memory or cores (one thread per replica is only a default of OpenMP and MKL),
the removal of old folders, and telling a ``kill -9`` from the kernel's out-of-memory killer,
which takes a cgroup. ``root`` must be on a local disk. Linux and macOS only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from executors import local_job, local_shim
from executors.base import (
    JobState,
    LaunchRefused,
    ReplicaHandle,
    ReplicaSpec,
    ReplicaStatus,
    RetryLater,
)

GRACE_S = 10.0
"""Between SIGTERM and SIGKILL unless told otherwise."""

POLL_S = 0.05

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

# A replica gets what a program needs to run and to reach a store, and none of the control plane's
# own secrets (database, broker, signing key).
# fmt: off
_INHERITED = frozenset((
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR",
    "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
))
_INHERITED_PREFIXES = (
    "LC_", "AWS_", "AZURE_", "GOOGLE_", "GCSFS_", "STORAGE_", "FSSPEC_", "HF_", "NVIDIA_",
)
# fmt: on
_DEFAULTS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class LocalProcessExecutor:
    """Runs replicas as child processes; ``root`` holds one folder per job."""

    backend = "local"

    def __init__(self, root: Path, *, grace_s: float = GRACE_S) -> None:
        self.root = root
        self.grace_s = grace_s

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str,
        entrypoint_args: Mapping[str, Any] | None = None,
        *,
        specs: Sequence[ReplicaSpec] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[ReplicaHandle]:
        """See :meth:`executors.base.ServerlessExecutor.launch_replicas`.

        The environment is :data:`_INHERITED` of ours, then one thread for OpenMP and MKL, then
        ``env``. When one of several cannot be launched the others may have been: launch again
        with the same specs and they are found.
        """
        given = dict(entrypoint_args or {})
        args = [str(arg) for arg in given.pop("args", ())]
        rank_env = str(given.pop("rank_env", "REPLICA_RANK"))
        if given:
            raise ValueError(f"entrypoint_args: expected args and rank_env, found {sorted(given)}")
        if specs is None:
            made = secrets.token_hex(6)
            specs = [ReplicaSpec(launch_key=f"{made}-{n}", replica=n) for n in range(n_replicas)]
        if len(specs) != n_replicas:
            raise ValueError(f"expected {n_replicas} specs, found {len(specs)}")
        command = [sys.executable, "-m", entrypoint, *args]
        with contextlib.ExitStack() as started:
            for spec in specs:
                environment = _environment({rank_env: str(spec.replica), **(env or {})})
                started.enter_context(self._start(spec.launch_key, command, environment))
        return [self._handle(spec.launch_key) for spec in specs]

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        return [local_job.status(self._folder(handle.launch_key)) for handle in handles]

    def find(self, launch_key: str) -> ReplicaHandle | None:
        folder = self._folder(launch_key)
        if (folder / "handle.json").exists() or local_job.held(folder / "lock"):
            return self._handle(launch_key)
        return None

    def live(self) -> list[ReplicaHandle]:
        """Every job of this root that has not ended."""
        if not self.root.is_dir():
            return []
        keys = sorted(path.name for path in self.root.iterdir() if _KEY.fullmatch(path.name))
        return [self._handle(key) for key in keys if local_job.held(self._folder(key) / "lock")]

    def logs(self, handle: ReplicaHandle, *, follow: bool = False) -> Iterator[str]:
        path = self._folder(handle.launch_key) / "log"
        held = b""
        with contextlib.ExitStack() as stack:
            file = None
            while True:
                # Asked before reading: what is written before the end is then surely read.
                ended = local_job.status(self._folder(handle.launch_key)).state is JobState.ENDED
                if file is None and path.exists():
                    file = stack.enter_context(path.open("rb"))
                *lines, held = (held + (file.read() if file else b"")).split(b"\n")
                for line in lines:
                    yield line.decode(errors="replace")
                if ended or not follow:
                    break
                time.sleep(POLL_S)
        if held:
            yield held.decode(errors="replace")

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        """Ask each to end and return at once; :meth:`collect` waits for it."""
        for handle in handles:
            folder = self._folder(handle.launch_key)
            if not folder.is_dir() or (folder / "exit.json").exists():
                continue
            try:
                (folder / "cancel").touch()
            except OSError as error:
                if not (folder / "handle.json").exists():  # without the mark it could be missed
                    raise RetryLater(f"{folder}: {error.strerror}") from error
            local_job.ask_to_end(folder)

    def collect(self, handles: Sequence[ReplicaHandle], timeout: float) -> list[ReplicaStatus]:
        deadline = time.monotonic() + timeout
        while True:
            statuses = self.poll(handles)
            left_s = deadline - time.monotonic()
            if left_s <= 0 or all(status.state is JobState.ENDED for status in statuses):
                return statuses
            time.sleep(min(POLL_S, left_s))

    def _handle(self, launch_key: str) -> ReplicaHandle:
        return ReplicaHandle(backend=self.backend, launch_key=launch_key)

    def _folder(self, launch_key: str) -> Path:
        if not _KEY.fullmatch(launch_key):
            raise LaunchRefused(
                f"launch key: expected 1 to 128 letters, digits, '.', '_' or '-', "
                f"found {launch_key!r}"
            )
        return self.root / launch_key

    @contextlib.contextmanager
    def _start(self, launch_key: str, command: list[str], env: dict[str, str]) -> Iterator[None]:
        """Start the job unless it was started before; on leaving, its shim is on its own."""
        folder = self._folder(launch_key)
        process = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "lock").open("ab") as lock, (folder / "log").open("ab") as log:
                if local_job.take(lock.fileno(), folder):
                    process = subprocess.Popen(
                        [
                            *(sys.executable, "-I", local_shim.__file__),
                            *(str(lock.fileno()), str(self.grace_s), str(folder.absolute())),
                            *command,
                        ],
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        pass_fds=(lock.fileno(),),
                        start_new_session=True,
                    )
        except OSError as error:
            refused = error.errno in (
                errno.EACCES,
                errno.EROFS,
                errno.ENOTDIR,
                errno.EEXIST,
                errno.ENOSPC,
            )
            kind = LaunchRefused if refused else RetryLater
            raise kind(f"cannot start {launch_key} in {folder}: {error.strerror}") from error
        yield
        if process is not None and process.wait() != 0:
            raise RetryLater(f"cannot start {launch_key}: {local_job.tail(folder / 'log')}")


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    ours = {
        name: value
        for name, value in os.environ.items()
        if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
    }
    return {**ours, **_DEFAULTS, **given}
