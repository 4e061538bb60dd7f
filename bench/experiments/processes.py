"""Replica processes that are killed and started again on a schedule, and what that cost them.

A *life* is one process of a replica number. :class:`Herd` starts every replica, kills each life
with SIGKILL after a random time, starts the next one after a delay, and notes when. The schedule is
a function of (seed, replica, life), so that it can be had again.

Left out: what is right or wrong with the log (:mod:`bench.experiments.audit`).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from executors.process_guard import tethered

ROOT = Path(__file__).resolve().parent.parent.parent


def life_s(seed: int, replica: int, life: int, *, mtbf_s: float) -> float:
    """How long a life lasts: exponential with mean ``mtbf_s``."""
    return random.Random(f"{seed} {replica} {life}").expovariate(1 / mtbf_s)


@dataclass(frozen=True, kw_only=True)
class Death:
    """One SIGKILL. ``lived_s`` since its start."""

    replica: int
    life: int
    wall_s: float
    lived_s: float


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One start of a process."""

    replica: int
    wall_s: float


@dataclass
class _Slot:
    process: subprocess.Popen[bytes] | None = None
    life: int = 0
    started_s: float = 0.0
    dies_s: float = float("inf")
    starts_s: float = 0.0


class Herd:
    """``replicas`` processes on one rendezvous."""

    def __init__(
        self,
        uri: str,
        *,
        replicas: int,
        step_s: float,
        env: Mapping[str, str],
        logs: Path,
        seed: int,
        relaunch_s: float,
    ) -> None:
        self._uri = uri
        self._step_s = step_s
        self._env = {**os.environ, **env, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._logs = logs
        self._seed = seed
        self._relaunch_s = relaunch_s
        self._slots = [_Slot() for _ in range(replicas)]
        self._mtbf_s: float | None = None
        self.deaths: list[Death] = []
        self.launches: list[Launch] = []
        self.unexpected: list[str] = []

    def start(self) -> None:
        for replica in range(len(self._slots)):
            self._launch(replica)

    def kill_from_now(self, mtbf_s: float) -> None:
        """Every life from now on lasts an exponential time of mean ``mtbf_s``."""
        self._mtbf_s = mtbf_s
        for replica, slot in enumerate(self._slots):
            slot.dies_s = time.monotonic() + self._life_s(replica)

    def spare(self) -> None:
        """Kill no more; start what is due at once."""
        self._mtbf_s = None
        for slot in self._slots:
            slot.dies_s, slot.starts_s = float("inf"), 0.0

    def tend(self) -> None:
        """Kill and start whatever is due. A process that ended by itself is noted."""
        now_s = time.monotonic()
        for replica, slot in enumerate(self._slots):
            if slot.process is None:
                if now_s >= slot.starts_s:
                    self._launch(replica)
            elif slot.process.poll() is not None:
                self.unexpected.append(
                    f"replica {replica}, life {slot.life}, ended by itself with status "
                    f"{slot.process.returncode}: {self._last_words(replica)}"
                )
                self._bury(slot, now_s)
            elif now_s >= slot.dies_s:
                slot.process.send_signal(signal.SIGKILL)
                slot.process.wait()
                self.deaths.append(
                    Death(
                        replica=replica,
                        life=slot.life,
                        wall_s=time.time(),
                        lived_s=now_s - slot.started_s,
                    )
                )
                self._bury(slot, now_s)

    def wait(self, timeout_s: float) -> None:
        """Until all have ended by themselves with status 0; what did not is noted and killed."""
        deadline_s = time.monotonic() + timeout_s
        for replica, slot in enumerate(self._slots):
            if slot.process is None:
                continue
            try:
                status = slot.process.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                slot.process.kill()
                slot.process.wait()
                self.unexpected.append(
                    f"replica {replica} did not end: {self._last_words(replica)}"
                )
                continue
            if status:
                self.unexpected.append(
                    f"replica {replica} ended with status {status}: {self._last_words(replica)}"
                )

    def kill_all(self) -> None:
        for slot in self._slots:
            if slot.process is not None and slot.process.poll() is None:
                slot.process.kill()
                slot.process.wait()

    def _life_s(self, replica: int) -> float:
        if self._mtbf_s is None:
            return float("inf")
        return life_s(self._seed, replica, self._slots[replica].life, mtbf_s=self._mtbf_s)

    def _launch(self, replica: int) -> None:
        slot = self._slots[replica]
        slot.life += 1
        self.launches.append(Launch(replica=replica, wall_s=time.time()))
        command = [sys.executable, "-m", "bench.experiments.paced_replica"]
        with self._log(replica).open("ab") as log:
            slot.process = subprocess.Popen(
                tethered([*command, str(self._step_s), self._uri]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**self._env, "REPLICA_RANK": str(replica)},
            )
        slot.started_s = time.monotonic()
        slot.dies_s = slot.started_s + self._life_s(replica)

    def _bury(self, slot: _Slot, now_s: float) -> None:
        slot.process = None
        slot.starts_s = now_s + self._relaunch_s

    def _log(self, replica: int) -> Path:
        return self._logs / f"{replica}.{self._slots[replica].life:04d}.log"

    def _last_words(self, replica: int) -> str:
        lines = self._log(replica).read_text(errors="replace").splitlines()
        return lines[-1] if lines else "no output"
