"""Faults around a whole server while a run trains: what is lost, and what the pages show.

Starts ``manage.py serve`` on a real S3 server behind a proxy that can fail
(:mod:`bench.support.bucket_proxy`). For each fault a run of two local replicas is submitted; after
its first rounds the fault begins, lasts ``--seconds`` and ends, and the run trains on to its end.
Then the run is audited: it succeeded, each round was committed once, every point of every replica's
loss is there once, each replica was launched once, its end was announced once, and its journal in
the bucket has no gap and ends with the run's end. During the fault the run page, its state and
``/readyz`` are read every second. *Back* is the time from the end of the fault until none of them
shows anything wrong and a new round is shown.

The full disk needs root (the state folder is a small tmpfs), the clock a C compiler; without them
these trials are left out. The clock of the server's processes is shifted, not the clock of the
bucket nor that of the replicas.

Usage: python bench/server_faults.py [--seconds 30] [--only hang ...] [--rounds 40]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.support.bucket_proxy import Fault  # noqa: E402
from bench.support.page_watch import PageWatch  # noqa: E402
from bench.support.server_harness import (  # noqa: E402
    Harness,
    bucket,
    fill_disk,
    flush_broker,
    kill_workers,
    lock_database,
    running_harness,
    set_clock,
    start_second_server,
)
from tests.e2e.lives import create  # noqa: E402
from tests.servers import wait_until  # noqa: E402
from tests.stack import LiveStack  # noqa: E402

REPLICAS, SYNC_EVERY = 2, 25
PATIENCE_S = 420.0

AUDIT = """
import json
from diloco.protocol import keys
from diloco.store.base import open_store
from runs.ingest.journal import Entry
from runs.models import Event, ReplicaAttempt, Run
run = Run.objects.get(pk={run!r})
store = open_store(run.rendezvous)
numbers = sorted(int(one.key[-13:-5]) for one in store.list(keys.JOURNAL))
states = [
    entry.run["state"]
    for entry in (Entry.from_bytes(store.get(keys.journal(n))) for n in numbers)
    if entry.run
]
print(json.dumps({{
    "state": run.state, "reason": run.state_reason, "committed": run.committed_rounds,
    "rounds": list(run.rounds.order_by("number").values_list("number", "state")),
    "attempts": ReplicaAttempt.objects.filter(replica__run=run).count(),
    "points": sum(b.count for b in run.metric_blocks.filter(series="loss", level=0)),
    "ends": Event.objects.filter(
        run=run, to_state__in=["succeeded", "failed", "cancelled"]).count(),
    "journal": [numbers == list(range(numbers[0], numbers[0] + len(numbers))), states[-1]],
    "warnings": list(Event.objects.filter(run=run).exclude(level="info")
                     .order_by("id").values_list("kind", "message")),
    "alerts": list(run.alerts.order_by("id").values_list("kind", flat=True)),
}}))
"""


@dataclass(frozen=True, kw_only=True)
class Trial:
    name: str
    begin: Callable[[Harness], None]
    lasts: bool = True
    needs: str = ""


TRIALS = (
    Trial(name="bucket hangs", begin=bucket(Fault.HANG)),
    Trial(name="bucket away", begin=bucket(Fault.AWAY)),
    Trial(name="bucket read-only", begin=bucket(Fault.READ_ONLY)),
    Trial(name="bucket slow", begin=bucket(Fault.SLOW)),
    Trial(name="stale lists", begin=bucket(Fault.STALE)),
    Trial(name="broker flushed", begin=flush_broker, lasts=False),
    Trial(name="workers killed", begin=kill_workers, lasts=False),
    Trial(name="database locked", begin=lock_database),
    Trial(name="disk full", begin=fill_disk, needs="state_size"),
    Trial(name="clock 1 h back", begin=set_clock(-3600), needs="clock"),
    Trial(name="clock 1 h ahead", begin=set_clock(3600), needs="clock"),
    Trial(name="second server", begin=start_second_server, lasts=False),
)


def audit(stack: LiveStack, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(stack.python(AUDIT.format(run=run)))
    return found


def problems(seen: dict[str, Any], rounds: int, attempts: int = REPLICAS) -> list[str]:
    expected = {
        "state": ("succeeded", seen["state"]),
        "rounds": ([[n, "committed"] for n in range(1, rounds + 1)], seen["rounds"]),
        "points": (REPLICAS * SYNC_EVERY * rounds, seen["points"]),
        "attempts": (attempts, seen["attempts"]),
        "ends": (1, seen["ends"]),
        "journal": ([True, "succeeded"], seen["journal"]),
    }
    return [f"{name}: expected {a}, found {b}" for name, (a, b) in expected.items() if a != b]


def submit(stack: LiveStack, name: str, rounds: int) -> str:
    return create(
        stack,
        name,
        total_rounds=rounds,
        sync_every=SYNC_EVERY,
        num_replicas=REPLICAS,
        start_replicas=REPLICAS,
        heartbeat_timeout_s=30.0,
        checkpoint_every=10,
    )


def rounds_of(stack: LiveStack, run: str) -> int:
    code = f"from runs.models import Run\nprint(Run.objects.get(pk={run!r}).committed_rounds)"
    return int(stack.python(code))


def ended(stack: LiveStack, run: str) -> bool:
    code = (
        f"from runs.models import Run\nrun = Run.objects.get(pk={run!r})\n"
        "print(run.ended and run.state)"
    )
    return stack.python(code) != "False"


def settle(stack: LiveStack, run: str, wrong: Callable[[dict[str, Any]], list[str]]) -> Any:
    """The audit of the run after its end, once nothing is wrong or time is up."""
    deadline = time.monotonic() + PATIENCE_S
    while not ended(stack, run) and time.monotonic() < deadline:
        time.sleep(1)
    seen: dict[str, Any] = {}

    def settled() -> bool:
        seen.update(audit(stack, run))
        return not wrong(seen)

    with contextlib.suppress(AssertionError):
        wait_until(settled, "", timeout_s=60, every_s=1)
    return seen


def tracebacks(var: Path) -> dict[str, int]:
    """Log -> number of tracebacks in it."""
    logs = sorted((var / "logs").glob("*.log"))
    return {log.stem: log.read_text(errors="replace").count("Traceback (most") for log in logs}


def attempt(harness: Harness, trial: Trial, *, seconds: float, rounds: int) -> list[str]:
    stack = harness.stack
    printed, before = len(stack.output()), tracebacks(stack.var)
    run = submit(stack, trial.name, rounds)
    wait_until(lambda: rounds_of(stack, run) >= 3, f"{trial.name}: no rounds", timeout_s=240)
    watch = PageWatch(harness.fetch, run)
    trial.begin(harness)
    watch.during(seconds if trial.lasts else 0)
    shown = len(watch.seen)
    harness.heal()
    back_s = watch.until_normal(patience_s=PATIENCE_S)
    seen = settle(stack, run, lambda seen: problems(seen, rounds))
    wrong = problems(seen, rounds)
    print(f"## {trial.name}: {'; '.join(wrong) or 'nothing lost'}")
    print(f"back: {'never' if back_s is None else f'{back_s:.1f} s'}")
    for number, (at, one) in enumerate(watch.seen):
        print(f"  {at:6.1f} s {'' if number < shown else '(after) '}{one.text[:600]}")
    for kind, message in seen["warnings"]:
        print(f"  event {kind}: {message[:200]}")
    print(f"  alerts: {', '.join(seen['alerts']) or 'none'}")
    new = {k: n - before.get(k, 0) for k, n in tracebacks(stack.var).items()}
    print(f"  tracebacks: { {k: n for k, n in new.items() if n} or 'none' }")
    for line in [*harness.notes, *stack.output()[printed:].splitlines()]:
        print(f"  output: {line[:300]}")
    harness.notes.clear()
    sys.stdout.flush()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="how long a fault lasts")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of faults")
    parser.add_argument("--keep-logs", type=Path, help="copy the server's logs to this folder")
    given = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder, running_harness(Path(folder)) as made:
        for trial in TRIALS:
            if given.only and not any(part in trial.name for part in given.only):
                continue
            if trial.needs and not getattr(made, trial.needs):
                print(f"{trial.name}: left out, {trial.needs} cannot be had here")
                continue
            try:
                failed += bool(attempt(made, trial, seconds=given.seconds, rounds=given.rounds))
            except (AssertionError, ValueError) as error:
                made.heal()
                failed += 1
                print(f"## {trial.name}: {error}", flush=True)
        if given.keep_logs:
            shutil.copytree(made.stack.var / "logs", given.keep_logs, dirs_exist_ok=True)
    print(f"{failed} faults lost something")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
