"""Replicas as processes of this machine.

::

    state_dir/jobs/<launch_key>/lock         flock, held by the job's shim: held means alive
                                job.json     what to run and its limits, without the environment
                                handle.json  who the shim is (pid, start time, boot); its first act
                                log          what the replica printed
                                cancel       somebody asked for the end
                                exit.json    how it ended; the shim's last act
                                reserve      room for handle.json and exit.json on a full disk
    state_dir/gpus/<gpu>.lock                flock, held by the shim of the job that has it
    state_dir/code/                          code and packages that replicas fetched

A launcher takes the lock and hands it to a *shim* (:mod:`executors.local.shim`) in a session of its
own, which starts the replica and outlives the launcher. Whoever finds the lock taken finds
the job; so a key launched twice, at once or after a launcher was killed between *start* and *save*,
starts one job, and any process can ask about it. A process is signalled only while the lock is
held and its start time is the recorded one, so a reused process id never is.

``cancel`` does not wait: the shim sends SIGTERM to the replica's process group and, when
``grace_s`` is over, SIGKILL; so it does at the deadline. On Linux this includes processes that the
replica has put into a group or session of their own. A shim that is itself killed takes the
replica with it on Linux; the next ``poll`` or ``cancel`` ends what the replica has started
(:mod:`executors.local.survivors`), and elsewhere than on Linux the replica itself.

A full disk delays a launch (:class:`~executors.base.NoCapacity`). A job keeps a little room on
the disk, so that its end is recorded when the disk has filled up meanwhile.

An executor lists jobs of its own ``state_dir`` and deployment only. No job depends on the process
that launched it: neither its end nor that of a server (:mod:`executors.process_guard`) ends a
replica; only :meth:`LocalProcessExecutor.cancel` does.

Code comes from the rendezvous as on any other backend (:mod:`executors.bootstrap.command`), so that
local replicas run just what remote ones do; requirements this Python lacks go into a layer over it.

A replica on ``cpu`` sees no GPU, one on ``gpu`` sees the one it was given
(:mod:`executors.local.gpus`). Options: :mod:`executors.local.options`.

Left out: limits on cores (one thread per replica is only a default of OpenMP and MKL), and the
removal of old folders. ``state_dir`` must be on a local disk. Linux and macOS only.
"""

from __future__ import annotations

import contextlib
import errno
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from executors import launching
from executors.base import (
    Capabilities,
    Cause,
    CodeRef,
    ExecutorConfig,
    ExecutorError,
    JobState,
    LaunchRefused,
    LogLine,
    NeedsPerson,
    NoCapacity,
    PendingCause,
    Problem,
    ReplicaHandle,
    ReplicaSpec,
    ReplicaStatus,
    RetryLater,
)
from executors.bootstrap import command as bootstrap
from executors.catalogue import LOCAL
from executors.local import job, shim, survivors, user
from executors.local.environment import replica_environment
from executors.local.gpus import free_gpu, gpus_of
from executors.local.options import read_options, this_machine

POLL_S = 0.05


class LocalProcessExecutor(launching.LaunchReplicas):
    """Runs replicas as processes that outlive this one."""

    backend = "local"
    capabilities = Capabilities(images=False, remote=False)

    def __init__(self, config: ExecutorConfig) -> None:
        if config.state_dir is None:
            raise ValueError("local: expected a state_dir, where jobs keep their files, found none")
        self.config = config
        self.root = config.state_dir / "jobs"
        self._fetched = {"DILOCO_CODE_DIR": str((config.state_dir / "code").absolute())}

    @property
    def grace_s(self) -> float:
        """How long a cancelled replica has, unless its own options say otherwise."""
        return read_options(self.config.options, {}).grace_s

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
        """See :meth:`executors.base.ServerlessExecutor.ensure`.

        The environment is :mod:`executors.local.environment`'s, then ``env`` and the secrets.
        """
        request = launching.prepare(specs, entrypoint_args)
        command = bootstrap.command(
            entrypoint, request.args, python=sys.executable, code=code, layer=True
        )
        with contextlib.ExitStack() as started:
            for spec in request.specs:
                plain, hidden = request.environment(spec, env=env, secrets=secrets)
                environment = replica_environment({**self._fetched, **plain}, secrets=hidden)
                started.enter_context(self._start(spec, command, environment))
        return [self._handle(spec.launch_key) for spec in request.specs]

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """Also ends what is left of a job whose shim was killed."""
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
        """See :meth:`executors.base.ServerlessExecutor.logs`. A position is a number of bytes."""
        folder = self._folder(handle.launch_key)
        position, held = int(after or 0), b""
        with contextlib.ExitStack() as stack:
            file: BinaryIO | None = None
            while True:
                # Asked before reading: what is written before the end is then surely read.
                ended = job.status(folder).state is JobState.ENDED
                if file is None and (folder / "log").exists():
                    file = stack.enter_context((folder / "log").open("rb"))
                    file.seek(position)
                *lines, held = (held + (file.read() if file else b"")).split(b"\n")
                for line in lines:
                    position += len(line) + 1
                    yield LogLine(text=line.decode(errors="replace"), position=str(position))
                if ended or not follow:
                    break
                time.sleep(POLL_S)
        if held and ended:
            position += len(held)
            yield LogLine(text=held.decode(errors="replace"), position=str(position))

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        """All are asked, whatever fails."""
        errors = []
        for handle in handles:
            try:
                self._cancel(self._folder(handle.launch_key))
            except RetryLater as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _cancel(self, folder: Path) -> None:
        if not folder.is_dir() or (folder / "exit.json").exists():
            return
        try:
            (folder / "cancel").touch()
        except OSError as error:
            if not (folder / "handle.json").exists():  # without the mark it could be missed
                raise RetryLater(f"{folder}: {error.strerror}") from error
        job.ask_to_end(folder)
        survivors.end_survivors(folder)

    def collect(self, handles: Sequence[ReplicaHandle], timeout: float) -> list[ReplicaStatus]:
        return launching.collect(self.poll, handles, timeout, every_s=POLL_S)

    def check(self) -> str:
        return this_machine(len(gpus_of(self.config.options)))

    def preflight(self, spec: ReplicaSpec, count: int) -> list[Problem]:
        return list(self._problems(spec, count))

    def _problems(self, spec: ReplicaSpec, count: int) -> Iterator[Problem]:
        names = [hardware.name for hardware in LOCAL.hardware]
        if spec.hardware not in names:
            yield Problem(
                field="hardware", message=f"expected {' or '.join(names)}, found {spec.hardware!r}"
            )
        elif spec.hardware == "gpu" and count > (there := len(gpus_of(self.config.options))):
            yield Problem(
                field="hardware",
                message=f"expected at most {there} replicas, one for each GPU of this machine, "
                f"found {count}",
            )
        if spec.region:
            yield Problem(field="region", message=f"expected none, found {spec.region!r}")
        if spec.image:
            yield Problem(
                field="image", message=f"expected none for a process, found {spec.image!r}"
            )
        if spec.spot:
            yield Problem(field="spot", message="this machine has no spot price")
        if spec.timeout_s is not None and spec.timeout_s <= 0:
            yield Problem(
                field="timeout_s", message=f"expected more than 0, found {spec.timeout_s}"
            )
        try:
            read_options(self.config.options, spec.options)
        except LaunchRefused as error:
            yield Problem(field="options", message=str(error))

    def _handle(self, launch_key: str) -> ReplicaHandle:
        return ReplicaHandle(backend=self.backend, launch_key=launch_key)

    def _folder(self, launch_key: str) -> Path:
        return self.root / launching.check_launch_key(launch_key)

    @contextlib.contextmanager
    def _start(self, spec: ReplicaSpec, command: list[str], env: dict[str, str]) -> Iterator[None]:
        """Start the job unless it was started before; on leaving, its shim is on its own."""
        for problem in self._problems(spec, 0):
            raise LaunchRefused(f"{problem.field}: {problem.message}")
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
        options = read_options(self.config.options, spec.options)
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
    """A folder that cannot be used requires intervention; a full disk is waited for: it reports
    nothing about the request, and space becomes free without a change to the pool."""
    message = f"{where}: {error.strerror}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return NeedsPerson(message)
    if error.errno in shim.DISK_FULL:
        full = "disk full" if error.errno == errno.ENOSPC else "disk quota in use"
        return NoCapacity(f"{full}: {message}", pending=PendingCause.CAPACITY)
    return RetryLater(message)
