"""Replicas as processes of this machine.

::

    state_dir/jobs/<launch_key>/lock         flock, held by the job's shim while the job is alive
                                job.json     command and limits, without the environment
                                handle.json  pid, start time and boot of the shim; its first write
                                log          output of the replica
                                cancel       the end was requested
                                exit.json    how the job ended; the shim's last write
                                reserve      reserved disk space for handle.json and exit.json
    state_dir/gpus/<gpu>.lock                flock, held by the shim of the job that uses the GPU
    state_dir/code/                          code and packages that replicas fetched

A launcher takes the lock and passes it to a *shim* (:mod:`executors.local.shim`), which runs in its
own session, starts the replica and outlives the launcher. A held lock identifies the running job.
A key that is launched twice, at once or after a launcher was killed halfway, therefore starts one
job, and any process can query it. A process is signalled only while the lock is held and its start
time equals the recorded one, so a reused process id is never signalled.

``cancel`` returns at once. The shim sends SIGTERM to the replica's process group and SIGKILL after
``grace_s``; it does the same at the deadline. On Linux this includes processes that the replica
moved to another group or session. If the shim itself is killed, the kernel kills the replica (on
Linux), and the next ``poll`` or ``cancel`` kills the replica's children
(:mod:`executors.local.survivors`); on other systems it kills the replica too.

A full disk delays a launch (:class:`~executors.base.NoCapacity`). Each job reserves disk space, so
that its end can be recorded even if the disk fills up later.

An executor lists the jobs of its own ``state_dir`` and deployment only. No job depends on the
process that launched it: neither the end of that process nor the end of a server
(:mod:`executors.process_guard`) stops a replica; only :meth:`LocalProcessExecutor.cancel` does.

Code comes from the rendezvous as on every other backend (:mod:`executors.bootstrap.command`), so
local replicas run the same code as remote ones. Missing requirements are installed into a layer on
top of this Python.

A replica on ``cpu`` sees no GPU; one on ``gpu`` sees the GPU it was assigned
(:mod:`executors.local.gpus`). Options: :mod:`executors.local.options`.

Not supported: limits on CPU cores (one thread per replica is only a default of OpenMP and MKL) and
the removal of old folders. ``state_dir`` must be on a local disk. Linux and macOS only.
"""

from __future__ import annotations

import contextlib
import errno
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from executors import launching
from executors.base import (
    AccountError,
    Capabilities,
    Cause,
    ExecutorConfig,
    ExecutorError,
    JobRequest,
    JobState,
    LaunchRefused,
    LogLine,
    NoCapacity,
    PendingCause,
    Problem,
    ReplicaHandle,
    ReplicaSpec,
    ReplicaStatus,
    RetryLater,
)
from executors.bootstrap import command as bootstrap
from executors.executor import Executor
from executors.local import job, shim, survivors, user
from executors.local.environment import replica_environment
from executors.local.gpus import free_gpu, gpus_of
from executors.local.hardware import TABLE
from executors.local.options import Options, describe_machine

POLL_S = 0.05

PERMANENT_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
"""Errors of a state folder that an operator must correct."""


class LocalProcessExecutor(Executor):
    """Runs replicas as processes that outlive the launching process."""

    backend = "local"
    capabilities = Capabilities(images=False, remote=False)
    poll_s = POLL_S

    def __init__(self, config: ExecutorConfig) -> None:
        if config.state_dir is None:
            raise ValueError("local: expected a state_dir for the files of jobs, found none")
        self.config = config
        self.root = config.state_dir / "jobs"
        self._code_dir = {"DILOCO_CODE_DIR": str((config.state_dir / "code").absolute())}

    @property
    def grace_s(self) -> float:
        """Default time between SIGTERM and SIGKILL; a replica's own options can change it."""
        return launching.job_options(Options, self.config.options, {}).grace_s

    def start_all(self, jobs: Sequence[JobRequest]) -> list[ReplicaHandle]:
        """Start all shims first, then wait for them.

        A replica's environment is that of :mod:`executors.local.environment`, then the request's.
        """
        with contextlib.ExitStack() as started:
            for request in jobs:
                command = bootstrap.command(
                    request.entrypoint,
                    request.args,
                    python=sys.executable,
                    code=request.code,
                    layer=True,
                )
                environment = replica_environment(
                    {**self._code_dir, **request.env}, secrets=request.secrets
                )
                started.enter_context(self._start(request.spec, command, environment))
        return [self._handle(request.spec.launch_key) for request in jobs]

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """Also kills the remaining processes of a job whose shim was killed."""
        return [self._poll(self._folder(handle.launch_key)) for handle in handles]

    def _poll(self, folder: Path) -> ReplicaStatus:
        status = job.status(folder)
        if status.cause is Cause.LOST:
            survivors.end_survivors(folder)
        return status

    def find(self, launch_key: str) -> ReplicaHandle | None:
        folder = self._folder(launch_key)
        if (folder / "handle.json").exists() or job.held(folder / "lock"):
            return self._handle(launch_key)
        return None

    def live(self) -> list[ReplicaHandle]:
        if not self.root.is_dir():
            return []
        return [
            self._handle(folder.name)
            for folder in sorted(self.root.iterdir())
            if job.held(folder / "lock")
            and not (folder / "exit.json").exists()
            and job.deployment_of(folder) == self.config.deployment
        ]

    def logs(
        self, handle: ReplicaHandle, *, after: str = "", follow: bool = False
    ) -> Iterator[LogLine]:
        """See :meth:`executors.executor.Executor.logs`. A position is a byte offset."""
        folder = self._folder(handle.launch_key)
        position, partial = int(after or 0), b""
        with contextlib.ExitStack() as stack:
            file: BinaryIO | None = None
            while True:
                # Read the state first: output written before the end is then complete.
                ended = job.status(folder).state is JobState.ENDED
                if file is None and (folder / "log").exists():
                    file = stack.enter_context((folder / "log").open("rb"))
                    file.seek(position)
                *lines, partial = (partial + (file.read() if file else b"")).split(b"\n")
                for line in lines:
                    position += len(line) + 1
                    yield LogLine(text=line.decode(errors="replace"), position=str(position))
                if ended or not follow:
                    break
                time.sleep(POLL_S)
        if partial and ended:
            position += len(partial)
            yield LogLine(text=partial.decode(errors="replace"), position=str(position))

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        launching.call_each(self._cancel, handles)

    def _cancel(self, handle: ReplicaHandle) -> None:
        folder = self._folder(handle.launch_key)
        if not folder.is_dir() or (folder / "exit.json").exists():
            return
        try:
            (folder / "cancel").touch()
        except OSError as error:
            if not (
                folder / "handle.json"
            ).exists():  # without the file a starting shim could miss the request
                raise RetryLater(f"{folder}: {error.strerror}") from error
        job.request_end(folder)
        survivors.end_survivors(folder)

    def check(self) -> str:
        return describe_machine(len(gpus_of(self.config.options)))

    def preflight(self, spec: ReplicaSpec, count: int) -> list[Problem]:
        found = self.problems(spec)
        if spec.hardware == "gpu" and count > (present := len(gpus_of(self.config.options))):
            message = (
                f"expected at most {present} replicas, one for each GPU of this machine, "
                f"found {count}"
            )
            found.append(Problem(field="hardware", message=message))
        return found

    def problems(self, spec: ReplicaSpec) -> list[Problem]:
        found = super().problems(spec)
        names = [hardware.name for hardware in TABLE.hardware]
        if spec.hardware not in names:
            message = f"expected {' or '.join(names)}, found {spec.hardware!r}"
            found.append(Problem(field="hardware", message=message))
        if spec.region:
            found.append(Problem(field="region", message=f"expected none, found {spec.region!r}"))
        try:
            self._options(spec)
        except LaunchRefused as error:
            found.append(Problem(field="options", message=str(error)))
        return found

    def _options(self, spec: ReplicaSpec) -> Options:
        return launching.job_options(Options, self.config.options, spec.options)

    def _handle(self, launch_key: str) -> ReplicaHandle:
        return ReplicaHandle(backend=self.backend, launch_key=launch_key)

    def _folder(self, launch_key: str) -> Path:
        return self.root / launching.check_launch_key(launch_key)

    @contextlib.contextmanager
    def _start(self, spec: ReplicaSpec, command: list[str], env: dict[str, str]) -> Iterator[None]:
        """Start the job unless it was started before; on exit, wait until its shim is detached."""
        self.check_spec(spec)
        folder = self._folder(spec.launch_key)
        process = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "lock").open("ab") as lock:
                if job.take(lock.fileno(), folder):
                    process = self._start_shim(spec, command, env, lock)
        except OSError as error:
            raise _start_error(error, f"cannot start {spec.launch_key} in {folder}") from error
        yield
        if process is not None and process.wait() != 0:
            raise RetryLater(f"cannot start {spec.launch_key}: {job.tail(folder / 'log')}")

    def _start_shim(
        self, spec: ReplicaSpec, command: list[str], env: dict[str, str], lock: BinaryIO
    ) -> subprocess.Popen[bytes]:
        folder = self._folder(spec.launch_key)
        options = self._options(spec)
        with contextlib.ExitStack() as stack:
            locks, gpu = [lock], ""
            if spec.hardware == "gpu":
                gpus = gpus_of(self.config.options)
                gpu, taken = stack.enter_context(free_gpu(self.root.parent / "gpus", gpus))
                locks.append(taken)
            run_as = user.account()
            if run_as is not None:
                shared = self.root.parent
                user.share_state(shared, run_as, [shared / "rendezvous"])
                work = str(user.work_folder(folder, run_as))
                env = {**env, "HOME": work, "TMPDIR": work, "USER": run_as.pw_name}
            shim.reserve_space(folder)
            shim.write_json(
                folder / "job.json",
                {
                    "command": command,
                    "run_as": None
                    if run_as is None
                    else {"uid": run_as.pw_uid, "gid": run_as.pw_gid, "cwd": work},
                    "labels": launching.labels_of(self.config, spec),
                    "gpu": gpu,
                    "timeout_s": spec.timeout_s,
                    "memory_bytes": options.memory_bytes,
                    "nice": options.nice,
                    "grace_s": options.grace_s,
                },
            )
            descriptors = [file.fileno() for file in locks]
            log = stack.enter_context((folder / "log").open("ab"))
            return subprocess.Popen(
                [
                    *(sys.executable, "-I", shim.__file__, str(folder.absolute())),
                    *map(str, descriptors),
                ],
                env={"CUDA_VISIBLE_DEVICES": gpu, **env, **survivors.mark(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=descriptors,
                start_new_session=True,
            )


def _start_error(error: OSError, where: str) -> ExecutorError:
    """Classify an error of the state folder. A full disk is temporary: it does not depend on the
    request, and space can become free without a change to the pool."""
    message = f"{where}: {error.strerror}"
    if error.errno in PERMANENT_ERRORS:
        return AccountError(message)
    if error.errno in shim.DISK_FULL:
        full = "disk full" if error.errno == errno.ENOSPC else "disk quota in use"
        return NoCapacity(f"{full}: {message}", pending=PendingCause.CAPACITY)
    return RetryLater(message)
