"""The supervisor process between :mod:`executors.local.executor` and one replica.

    launcher --locks--> shim (own session) --> replica (own process group)

The shim holds the locks of the job and of its GPU while it lives; other processes take a held lock
as "running". It first writes ``handle.json``, then starts the command of ``job.json``. It ends the
replica on SIGTERM, at the deadline, and above the memory limit (SIGTERM to the replica's group,
then SIGKILL after the grace period), and finally writes ``exit.json``.

On Linux the shim is the *subreaper* of the replica's descendants: a child in its own session or
group (a rank of torchrun, a daemon) becomes the shim's child when its parent ends. The shim can
therefore end it, and no process of a job outlives the job.

The file is run by path in isolated mode and imports only the standard library and psutil, so it
depends neither on the run's code bundle nor on the state of the launcher. It has a single thread,
which makes ``preexec_fn`` safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

MEMORY_EVERY_S = 0.25
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_ROUNDS = 50
"""Maximum number of passes over the remaining processes: each can start another between passes."""
RESERVE, RESERVE_BYTES = "reserve", 16_384
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_ON_LINUX = sys.platform.startswith("linux")
_END_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGALRM}


class EndedBy(enum.StrEnum):
    """Why the shim ended the replica; ITSELF if it did not."""

    ITSELF = ""
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    MEMORY = "memory"


def boot_id() -> str:
    """An identifier of this boot: process ids and start times are only valid within one boot."""
    path = Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return str(int(psutil.boot_time()))


def started_since_boot_s(pid: int) -> float | None:
    """Start time of a process in seconds since boot; None on systems other than Linux.

    Unlike the wall time of psutil, it does not change when the clock is set.

    Raises :class:`ProcessLookupError` for an unknown process.
    """
    if not _ON_LINUX:
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError as error:
        raise ProcessLookupError(pid) from error
    # https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html: field 22, after the name in ().
    return int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file atomically."""
    made = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        made.write_text(json.dumps(value))
        made.replace(path)
    except OSError:
        made.unlink(missing_ok=True)
        raise


def reserve_space(folder: Path) -> None:
    """Reserve disk space for the shim's records, so that the end can be recorded on a full disk.

    Random bytes, because a file system can compress others.
    """
    (folder / RESERVE).write_bytes(os.urandom(RESERVE_BYTES))


def write_record(path: Path, value: dict[str, Any]) -> None:
    """Like :func:`write_json`, but uses the reserved space on a full disk."""
    try:
        write_json(path, value)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        (path.parent / RESERVE).unlink(missing_ok=True)
        write_json(path, value)


def memory_of(pid: int) -> int:
    """Resident bytes of a process and its descendants; shared pages count for each process."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += one.memory_info().rss
    return total


def kernel_kills() -> int:
    """Number of processes that the kernel's OOM killer has killed since boot."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def descendants(*, outside: int | None = None) -> list[psutil.Process]:
    """All descendants of this process, without the process group ``outside``."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if outside is None or os.getpgid(process.pid) != outside:
                found.append(process)
    return found


def kill_descendants(*, keep: int | None = None) -> None:
    """Kill all descendants. The process group ``keep`` is spared: :meth:`Shim.wait` reaps it."""
    if not _ON_LINUX:
        return
    for _ in range(KILL_ROUNDS):
        left = descendants(outside=keep)
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        for process in left:  # reap those adopted by now; the others belong to their parent
            with contextlib.suppress(OSError, psutil.Error):
                os.waitpid(process.pid, os.WNOHANG)
        time.sleep(0.01)


class Shim:
    """Supervises one replica, from the locks to ``exit.json``."""

    def __init__(self, folder: Path, gpu_fds: Sequence[int] = ()) -> None:
        self.folder = folder
        self.gpu_fds = gpu_fds
        job = json.loads((folder / "job.json").read_text())
        self.command: list[str] = job["command"]
        self.grace_s: float = job["grace_s"]
        self.timeout_s: float | None = job["timeout_s"]
        self.memory_bytes: int | None = job["memory_bytes"]
        self.nice: int = job["nice"]
        self.run_as: dict[str, Any] | None = job.get("run_as")
        self.ended_by = EndedBy.ITSELF
        self.message = ""
        self.group: int | None = None
        self.libc = ctypes.CDLL(None) if _ON_LINUX else None

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self.on_cancel)
        signal.signal(signal.SIGINT, self.on_cancel)
        signal.signal(signal.SIGALRM, self.on_alarm)
        if self.libc is not None:
            self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        me = psutil.Process()
        now = time.time()
        write_record(
            self.folder / "handle.json",
            {
                "pid": me.pid,
                "created_s": me.create_time(),
                "started_since_boot_s": started_since_boot_s(me.pid),
                "boot_id": boot_id(),
                "started_wall_s": now,
                "deadline_wall_s": None if self.timeout_s is None else now + self.timeout_s,
            },
        )
        # Checked after handle.json is written: a canceller writes this file and then reads
        # handle.json, so at least one of the two sees the other.
        if (self.folder / "cancel").exists():
            self.ended_by = EndedBy.CANCELLED
        if self.ended_by:
            self.write_end(exit_code=None, message="cancelled before it was started")
            return
        kills = kernel_kills()
        try:
            exit_code = self.wait(self.start())
        except OSError as error:
            self.write_end(
                exit_code=None, message=f"could not start {self.command[0]}: {error.strerror}"
            )
            return
        if exit_code == -signal.SIGKILL and not self.ended_by and kernel_kills() > kills:
            self.ended_by = EndedBy.MEMORY
            self.message = "killed by the kernel, out of memory"
        self.write_end(exit_code=exit_code, message=self.message)

    def start(self) -> subprocess.Popen[bytes]:
        shim_pid = os.getpid()

        def in_child() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            os.nice(self.nice)
            if self.run_as is not None:
                os.setgroups([])
                os.setgid(self.run_as["gid"])
                os.setuid(self.run_as["uid"])
                os.umask(0o007)  # the server must be able to read files in a shared folder
            if self.libc is not None:
                # The replica ends with its shim: no other process would record its end.
                self.libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
                if os.getppid() != shim_pid:
                    os._exit(1)

        with _blocked(), (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                self.command,
                cwd=self.run_as["cwd"] if self.run_as else self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=in_child,
            )
            self.group = process.pid
            if self.ended_by:  # requested before the group existed
                self.end_group()
            elif self.timeout_s is not None:
                signal.setitimer(signal.ITIMER_REAL, self.timeout_s)
        return process

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        if self.memory_bytes is not None:
            self.watch_memory(process, self.memory_bytes)
        if _ON_LINUX:
            # Not reaped yet, so that its pid cannot be reused.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        else:
            process.wait()
        with _blocked():
            self.signal_group(signal.SIGKILL)  # remaining processes of the group
            self.group = None
            exit_code = process.wait()
            kill_descendants()
            return exit_code

    def watch_memory(self, process: subprocess.Popen[bytes], limit_bytes: int) -> None:
        """Enforce the memory limit until the process ends or its end is requested."""
        pidfd = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
        while not self.ended_by:
            if pidfd is not None:
                if select.select([pidfd], [], [], MEMORY_EVERY_S)[0]:
                    break
            elif process.poll() is not None:
                break
            else:
                time.sleep(MEMORY_EVERY_S)
            used = memory_of(process.pid)
            if used > limit_bytes:
                with _blocked():
                    if not self.ended_by:
                        self.ended_by = EndedBy.MEMORY
                        self.message = (
                            f"used {used >> 20} MiB of memory, more than its limit of "
                            f"{limit_bytes >> 20} MiB"
                        )
                        # SIGKILL at once: during a grace period it would allocate more.
                        self.signal_group(signal.SIGKILL)
        if pidfd is not None:
            os.close(pidfd)

    def on_cancel(self, signum: int, frame: FrameType | None) -> None:
        if not self.ended_by:
            self.ended_by = EndedBy.CANCELLED
            self.end_group()

    def on_alarm(self, signum: int, frame: FrameType | None) -> None:
        """Handle the deadline, or the end of the grace period."""
        if self.ended_by:
            self.signal_group(signal.SIGKILL)
            kill_descendants(keep=self.group)
        else:
            self.ended_by = EndedBy.DEADLINE
            self.message = f"ended at its deadline, {self.timeout_s:g} s after its start"
            self.end_group()

    def end_group(self) -> None:
        if self.group is not None:
            signal.setitimer(signal.ITIMER_REAL, max(self.grace_s, 1e-3))
            self.signal_group(signal.SIGTERM)
            for process in descendants(outside=self.group):
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGTERM)

    def signal_group(self, signum: signal.Signals) -> None:
        if self.group is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.group, signum)

    def write_end(self, *, exit_code: int | None, message: str = "") -> None:
        for fd in self.gpu_fds:  # before the end is visible, so that the GPU is free then
            os.close(fd)
        write_record(
            self.folder / "exit.json",
            {
                "exit_code": exit_code,
                "ended_by": self.ended_by,
                "ended_wall_s": time.time(),
                "message": message,
            },
        )
        (self.folder / RESERVE).unlink(missing_ok=True)


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """Delay requests to end until the block is left."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def main() -> None:
    """``shim.py FOLDER LOCK_FD [GPU_LOCK_FD]``"""
    folder, descriptors = Path(sys.argv[1]), [int(fd) for fd in sys.argv[2:]]
    for fd in descriptors:
        os.set_inheritable(fd, False)  # the replica must not inherit the locks
    if os.fork():
        # Detached: the launcher has no zombie to reap and can end at any time.
        os._exit(0)
    Shim(folder, descriptors[1:]).run()


if __name__ == "__main__":
    main()
