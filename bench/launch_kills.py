"""Kill trials of launches: is there exactly one complete job for each launch key, whatever died?

A trial launches three replicas with secrets through a backend's real client against its emulator.
Each launch is interrupted up to six times, at a random request: the service refuses it (503), the
answer is lost, or the caller is killed before or after the request. Some calls run twice at the
same time, as a task that was delivered twice. Then ``ensure`` is repeated until it returns, as the
control plane does; a third of the trials abandon one launch half-way and end what ``live`` lists.

- *doubled*: launch keys with more than one live job after ``ensure`` has returned, or whose job
  started more than once
- *brief*: on a backend without unique names (Hugging Face), launch keys of which two jobs started
  because two callers submitted at once; the younger was cancelled, so it is not *doubled*
- *orphaned*: live jobs of abandoned or unknown keys, and objects that belong to no job
- *missing*: launch keys without a job, or whose job never started
- *incomplete*: jobs that lack an object which they need

The local backend has no service: there the process that launches is killed with SIGKILL at a random
moment of its call.

Usage: python bench/launch_kills.py [BACKEND ...] [--trials 50] [--seed 1]
The exit status is 1 where any count is not 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from executors.base import ExecutorError, ReplicaHandle
from executors.registry import BACKENDS
from tests.emulators.interruptions import Interruption
from tests.executors.harnesses import Harness, launch, open_harness, reason_without

REPLICAS = 3
INTERRUPTIONS = 6
LAUNCH_S = 0.3
"""About as long as a local launch takes: some kills come too late."""
BOUNDARIES = 8
"""More requests than any backend's ``ensure`` sends: some interruptions strike nothing."""
PATIENCE_S = 120.0
SECRETS = {"TOKEN": "s3cr3t-launch-kills"}


@dataclass
class Counts:
    """Of all trials of one backend."""

    launches: int = 0
    interrupted: int = 0
    doubled: int = 0
    brief: int = 0
    orphaned: int = 0
    missing: int = 0
    incomplete: int = 0

    @property
    def is_clean(self) -> bool:
        return not (self.doubled or self.orphaned or self.missing or self.incomplete)


def ensure(harness: Harness, key: str, folder: Path) -> ReplicaHandle:
    """By a caller that knows nothing of earlier calls."""
    return launch(harness.executor(), "count", folder / key, key=key, secrets=SECRETS)


def kill_callers(harness: Harness, key: str, folder: Path, callers: int, after_s: float) -> bool:
    """Launch in separate processes, kill them ``after_s`` later, and return whether one was
    killed."""
    pids = []
    for _ in range(callers):
        pid = os.fork()
        if pid == 0:
            try:
                ensure(harness, key, folder)
            finally:
                os._exit(0)
        pids.append(pid)
    time.sleep(after_s)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    return any(map(os.WIFSIGNALED, statuses))


def interrupt_often(
    harness: Harness, key: str, folder: Path, rng: random.Random, counts: Counts
) -> None:
    for _ in range(rng.randint(1, INTERRUPTIONS)):
        if reason_without(harness.backend, "interrupt"):
            callers = 2 if rng.random() < 0.2 else 1
            after_s = rng.uniform(0.0, LAUNCH_S)
            counts.interrupted += kill_callers(harness, key, folder, callers, after_s)
            continue
        harness.interrupt(rng.randrange(BOUNDARIES), rng.choice(list(Interruption)))
        callers = 2 if rng.random() < 0.2 else 1
        with ThreadPoolExecutor(callers) as pool:
            calls = [pool.submit(ensure, harness, key, folder) for _ in range(callers)]
        errors = [error for call in calls if (error := call.exception()) is not None]
        counts.interrupted += bool(errors)
        harness.restore()
        for error in errors:
            if not isinstance(error, ExecutorError):
                raise error
        if rng.random() < 0.3:
            harness.executor().find(key)  # a poll between two launches


def until(done: Callable[[], bool]) -> bool:
    """Whether it came true."""
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def complete(harness: Harness, key: str, folder: Path) -> bool:
    """Repeat ``ensure``, as every tick of the control plane does."""

    def returned() -> bool:
        try:
            ensure(harness, key, folder)
        except ExecutorError:
            return False
        return True

    return until(returned)


def trial(harness: Harness, number: int, folder: Path, rng: random.Random, counts: Counts) -> None:
    keys = [f"t{number}-{n}-1" for n in range(REPLICAS)]
    abandoned = rng.choice(keys) if rng.random() < 1 / 3 else ""
    counts.launches += len(keys)
    for key in keys:
        interrupt_often(harness, key, folder, rng, counts)
    kept = [key for key in keys if key != abandoned]
    for key in kept:
        complete(harness, key, folder)
    executor = harness.executor()
    unwanted = [handle for handle in executor.live() if handle.launch_key not in kept]
    executor.cancel(unwanted)
    started = {key: until((folder / key).exists) for key in kept}
    counts.missing += sum(not started[key] or executor.find(key) is None for key in kept)
    until(lambda: {handle.launch_key for handle in executor.live()} <= set(kept))
    counts.incomplete += len(harness.incomplete())
    live = [handle.launch_key for handle in executor.live()]
    counts.orphaned += sum(key not in kept for key in live)
    counts.doubled += sum(live.count(key) > 1 for key in kept)
    executor.cancel(executor.live())
    until(lambda: executor.live() == [])
    repeated = sum(
        path.exists() and path.read_text().count("started") > 1
        for path in (folder / key for key in keys)
    )
    if executor.capabilities.unique_names:
        counts.doubled += repeated
    else:
        counts.brief += repeated
    until(lambda: not harness.left_behind())
    counts.orphaned += len(harness.left_behind())


def run(backend: str, trials: int, seed: int) -> Counts:
    counts, rng = Counts(), random.Random(seed)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "started"
        folder.mkdir()
        (Path(root) / "world").mkdir()
        with open_harness(backend, Path(root) / "world") as harness:
            for number in range(trials):
                trial(harness, number, folder, rng, counts)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("backends", nargs="*", help="default: all")
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    names = [field.name for field in dataclasses.fields(Counts)]
    print(f"{arguments.trials} trials of {REPLICAS} launches, seed {arguments.seed}")
    print(f"| backend | {' | '.join(names)} | s |")
    print("| --- |" + " ---: |" * (len(names) + 1))
    clean = True
    for backend in arguments.backends or list(BACKENDS):
        began = time.perf_counter()
        counts = run(backend, arguments.trials, arguments.seed)
        clean &= counts.is_clean
        values = " | ".join(str(getattr(counts, name)) for name in names)
        print(f"| {backend} | {values} | {time.perf_counter() - began:.0f} |", flush=True)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
