"""The jobs of all emulated backends, as processes of this machine.

A job runs in its own folder and process group, with PATH, HOME, LANG, TMPDIR, OMP_NUM_THREADS and
PYTHONPYCACHEPREFIX of this process and otherwise only its given environment, as on a separate
machine. ``python`` is this interpreter. Output is stored by line, with the time of each. When this
process dies, its jobs are killed (Linux; see :mod:`tests.emulators.child`).

Not emulated: images, limits on memory or devices, and a restart of this process: jobs live as long
as their :class:`Processes`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tests.emulators import child

State = Literal["pending", "running", "ended"]
EndedBy = Literal["", "preempted", "oom", "deadline", "cancelled"]

GRACE_S = 10.0
"""Default time between SIGTERM and SIGKILL."""

OUTPUT_S = 30.0
"""Time to read an ended job's output if another process holds its pipe open."""

_INHERITED = ("PATH", "HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS", "PYTHONPYCACHEPREFIX")


@dataclass(frozen=True, kw_only=True)
class Job:
    """The state of a job at one moment. Times are Unix seconds, 0.0 before the event.

    ``exit_code`` is that of a container runtime: 128 + n for a process killed by ``signal`` n, 127
    if the command could not be started, None before the end and for a job that ended before its
    start. ``ended_by`` is empty for a job that ended by itself. ``changes`` increases with every
    change and every line of output.
    """

    id: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    state: State = "pending"
    created_wall_s: float = 0.0
    started_wall_s: float = 0.0
    ended_wall_s: float = 0.0
    exit_code: int | None = None
    signal: int = 0
    ended_by: EndedBy = ""
    pid: int = 0
    changes: int = 0


class _Running:
    """The process of a :class:`Job`; guarded by the condition of :class:`Processes`."""

    def __init__(self, job: Job, timeout_s: float | None, grace_s: float) -> None:
        self.job = job
        self.timeout_s = timeout_s
        self.grace_s = grace_s
        self.process: subprocess.Popen[bytes] | None = None
        self.lines: list[tuple[int, float, str]] = []
        self.ended_by: EndedBy = ""
        self.timers: list[threading.Timer] = []
        self.watcher: threading.Thread | None = None


class Processes:
    """The jobs of one emulated backend; ``root`` holds a folder for each."""

    def __init__(self, root: Path, *, grace_s: float = GRACE_S) -> None:
        self.root = root
        self.grace_s = grace_s
        self._jobs: dict[str, _Running] = {}
        self._changed = threading.Condition()
        # PR_SET_PDEATHSIG refers to the parent *thread*, so a permanent thread starts all jobs.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="job-starter")

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        timeout_s: float | None = None,
        job_id: str | None = None,
        grace_s: float | None = None,
        held: bool = False,
    ) -> Job:
        """Start ``command``; with ``held`` it stays pending until :meth:`begin`.

        ``timeout_s`` after its start it is ended by SIGTERM and, ``grace_s`` later, SIGKILL.
        Raises :class:`ValueError` for an id that was used before.
        """
        new_id = job_id or f"job-{secrets.token_hex(6)}"
        job = Job(id=new_id, command=tuple(command), env=dict(env), created_wall_s=time.time())
        with self._changed:
            if new_id in self._jobs:
                raise ValueError(f"job id: expected a new one, found {new_id!r}")
            self._jobs[new_id] = _Running(
                job, timeout_s, self.grace_s if grace_s is None else grace_s
            )
        return job if held else self.begin(new_id)

    def begin(self, job_id: str) -> Job:
        """Start a held job. Does nothing for a job that is not pending."""
        self._starter.submit(self._begin, self._jobs[job_id]).result()
        return self.get(job_id)

    def get(self, job_id: str) -> Job:
        """The job. Raises :class:`KeyError` for an unknown id."""
        return self._jobs[job_id].job

    def all(self) -> list[Job]:
        with self._changed:
            return [running.job for running in self._jobs.values()]

    def kill(
        self, job_id: str, ended_by: EndedBy = "cancelled", *, grace_s: float | None = None
    ) -> None:
        """End the job without waiting: SIGTERM, then SIGKILL; with ``grace_s=0`` SIGKILL at once.

        The first call determines ``ended_by``. Does nothing for an ended job.
        """
        running = self._jobs[job_id]
        grace = running.grace_s if grace_s is None else grace_s
        with self._changed:
            process = running.process
            if running.job.state == "ended" or (process and process.returncode is not None):
                return
            running.ended_by = running.ended_by or ended_by
            if process is None:
                self._change(
                    running, state="ended", ended_by=running.ended_by, ended_wall_s=time.time()
                )
            elif grace <= 0:
                _signal(process, signal.SIGKILL)
            else:
                _signal(process, signal.SIGTERM)
                self._later(running, grace, lambda: self.kill(job_id, ended_by, grace_s=0))

    def forget(self, job_id: str) -> None:
        """Kill the job and delete its record."""
        self.kill(job_id, grace_s=0)
        with self._changed:
            watcher = self._jobs.pop(job_id).watcher
            self._changed.notify_all()
        if watcher is not None:
            watcher.join()

    def log_lines(self, job_id: str, after: int = 0) -> list[tuple[int, float, str]]:
        """Lines after number ``after``, counted from 1: (number, Unix seconds, text)."""
        with self._changed:
            return self._jobs[job_id].lines[max(0, after) :]

    def wait_change(self, job_id: str, timeout_s: float, *, after: int | None = None) -> Job:
        """Wait until ``changes`` exceeds ``after`` (by default the current value), the timeout
        passes, or the job is deleted. To miss no line, use the ``after`` of a :class:`Job` that was
        read before its lines."""
        with self._changed:
            running = self._jobs[job_id]
            seen = running.job.changes if after is None else after
            self._changed.wait_for(
                lambda: running.job.changes > seen or job_id not in self._jobs, timeout_s
            )
            return running.job

    def close(self) -> None:
        """Kill all jobs and wait for their ends."""
        for job in self.all():
            self.kill(job.id, grace_s=0)
        for running in list(self._jobs.values()):
            if running.watcher is not None:
                running.watcher.join()
        self._starter.shutdown()

    def _begin(self, running: _Running) -> None:
        """Start the process; runs in the starter thread."""
        job = running.job
        with self._changed:
            if job.state != "pending" or running.process is not None:
                return
            folder = self.root / job.id
            folder.mkdir(parents=True, exist_ok=True)
            name, *rest = job.command
            if name in ("python", "python3"):
                name = sys.executable
            running.process = subprocess.Popen(
                [*(sys.executable, "-I", "-S", child.__file__, str(os.getpid())), name, *rest],
                cwd=folder,
                env=_environment(job.env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            self._change(
                running, state="running", started_wall_s=time.time(), pid=running.process.pid
            )
            if running.timeout_s is not None:
                self._later(running, running.timeout_s, lambda: self.kill(job.id, "deadline"))
            running.watcher = threading.Thread(target=self._watch, args=(running,), daemon=True)
            running.watcher.start()

    def _watch(self, running: _Running) -> None:
        process = running.process
        assert process is not None
        reader = threading.Thread(target=self._read, args=(running, process), daemon=True)
        reader.start()
        if hasattr(os, "waitid"):
            # Not reaped yet, so that its pid cannot be reused.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            _signal(process, signal.SIGKILL)  # remaining processes of the group
        with self._changed:
            code = process.wait()  # with the lock, so that no reused pid is signalled
        reader.join(OUTPUT_S)
        with self._changed:
            for timer in running.timers:
                timer.cancel()
            self._change(
                running,
                state="ended",
                ended_wall_s=time.time(),
                exit_code=code if code >= 0 else 128 - code,
                signal=max(0, -code),
                ended_by=running.ended_by,
            )

    def _read(self, running: _Running, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout, (self.root / running.job.id / "log").open("ab") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                text = line.removesuffix(b"\n").decode(errors="replace")
                with self._changed:
                    running.lines.append((len(running.lines) + 1, time.time(), text))
                    self._change(running)

    def _change(self, running: _Running, **changes: object) -> None:
        changes["changes"] = running.job.changes + 1
        running.job = replace(running.job, **changes)  # type: ignore[arg-type]
        self._changed.notify_all()

    def _later(self, running: _Running, delay_s: float, act: Callable[[], None]) -> None:
        def run() -> None:
            with contextlib.suppress(KeyError):  # deleted in the meantime
                act()

        timer = threading.Timer(delay_s, run)
        timer.daemon = True
        running.timers.append(timer)
        timer.start()


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    beside = str(Path(sys.executable).parent)
    inherited["PATH"] = os.pathsep.join(filter(None, (beside, inherited.get("PATH", ""))))
    return {**inherited, **given}


def _signal(process: subprocess.Popen[bytes], signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signum)
