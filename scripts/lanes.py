"""Run several commands side by side and end with what failed in any of them.

``python scripts/lanes.py NAME=COMMAND ...``: as many at once as there are cores, in the order
given, each under a time limit and with its output in a file. What passed is told in a line. What
failed is told in full, and at the very end, where somebody looks first, comes a short list: every
test that failed, whatever lane it was in, and the last lines of each lane that failed. Nothing
that was started outlives this program.

It is for the checks of the whole repository (``.ci/run``), and knows of pytest only how its
summary begins a line.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TAIL = 25
"""Lines of a failed lane that are said again at the end."""

GRACE_S = 20.0
"""Between the interrupt, upon which pytest tells what it knows, and the kill."""

POLL_S = 0.2
_FAILURE = re.compile(r"^(FAILED|ERROR) \S.*$", re.MULTILINE)
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True)
class Lane:
    name: str
    command: str


@dataclass(frozen=True, kw_only=True)
class Result:
    lane: Lane
    status: int
    """Of the command; negative is a signal's number, as :mod:`subprocess` has it."""
    took_s: float
    limit_s: float | None
    """The limit that it was ended by."""
    output: str

    @property
    def passed(self) -> bool:
        return self.status == 0 and self.limit_s is None

    @property
    def verdict(self) -> str:
        if self.limit_s is not None:
            return f"ended after its limit of {self.limit_s:.0f} s"
        if self.status < 0:
            return f"killed by {signal.Signals(-self.status).name} after {self.took_s:.0f} s"
        if self.status:
            return f"failed with status {self.status} after {self.took_s:.0f} s"
        return f"passed in {self.took_s:.0f} s"

    @property
    def failures(self) -> list[str]:
        return [found.group() for found in _FAILURE.finditer(self.output)]


def tail(output: str, count: int = TAIL) -> str:
    return "\n".join(output.rstrip().splitlines()[-count:])


def summary(results: Sequence[Result]) -> str:
    """The last words: a line per lane, how each that failed ended, then the failures of all."""
    lines = [f"{r.lane.name}: {r.verdict}; {tail(r.output, 1) or 'no output'}" for r in results]
    failed = [result for result in results if not result.passed]
    for result in failed:
        lines += ["", f"== end of {result.lane.name}, {result.verdict}", tail(result.output)]
    named = [f"{r.lane.name}: {failure}" for r in failed for failure in r.failures]
    mute = [f"{r.lane.name}: {r.verdict}" for r in failed if not r.failures]
    if failed:
        lines += ["", f"== failed: {', '.join(r.lane.name for r in failed)}", *named, *mute]
    return "\n".join(lines)


class Running:
    """One lane at work, in a process group of its own."""

    def __init__(self, lane: Lane, *, folder: Path, limit_s: float) -> None:
        self.lane = lane
        self.limit_s = limit_s
        self.log = folder / f"{lane.name}.log"
        self.began = time.monotonic()
        self.over_limit = False
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                shlex.split(lane.command),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def result(self) -> Result | None:
        """None while it runs. Past its limit it is interrupted, then killed."""
        took_s = time.monotonic() - self.began
        status = self.process.poll()
        if status is None:
            if took_s > self.limit_s + GRACE_S:
                self.signal(signal.SIGKILL)
            elif took_s > self.limit_s and not self.over_limit:
                self.over_limit = True
                self.signal(signal.SIGINT)
            return None
        return Result(
            lane=self.lane, status=status, took_s=took_s,
            limit_s=self.limit_s if self.over_limit else None,
            output=self.log.read_text(errors="replace"),
        )  # fmt: skip

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def run(
    lanes: Sequence[Lane], *, folder: Path, at_once: int, limit_s: float, say: Callable[[str], None]
) -> list[Result]:
    """Results in the order of ``lanes``."""
    waiting, running = list(lanes), list[Running]()
    results: dict[str, Result] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(Running(waiting.pop(0), folder=folder, limit_s=limit_s))
                say(f"{running[-1].lane.name}: {running[-1].lane.command}")
            time.sleep(POLL_S)
            for lane in list(running):
                result = lane.result()
                if result is not None:
                    running.remove(lane)
                    results[lane.lane.name] = result
                    say(f"{lane.lane.name}: {result.verdict}")
    finally:
        for lane in running:
            lane.signal(signal.SIGKILL)
        end_descendants()
    return [results[lane.name] for lane in lanes]


def adopt_orphans() -> None:
    """On Linux, processes whose parent died become ours, so that they can be found."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    import psutil

    left = psutil.Process().children(recursive=True)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=10)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit-s", type=float, default=1800.0, help="of each lane")
    parser.add_argument("lanes", nargs="+", metavar="NAME=COMMAND")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    parted = [given.partition("=") for given in options.lanes]
    lanes = [Lane(name=name, command=command) for name, _, command in parted]
    # Started in the background of a shell, everybody would ignore the interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    adopt_orphans()

    def say(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)

    with tempfile.TemporaryDirectory(prefix="lanes-") as folder:
        results = run(
            lanes, folder=Path(folder), at_once=options.at_once, limit_s=options.limit_s, say=say
        )
    for result in results:
        if not result.passed:
            print(f"\n== all of {result.lane.name}\n{result.output}")
    print(f"\n{summary(results)}", flush=True)
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
