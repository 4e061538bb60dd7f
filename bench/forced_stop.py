"""Seconds from a forced stop to the end of a local replica's process, with hostile records.

::

    python bench/forced_stop.py [--runs 3] [--clean]
    python bench/forced_stop.py --backends [BACKEND ...]

Starts a whole server (``manage.py serve``) in a new folder and a run of one local replica.
Before the stop it writes into the run's rendezvous, as any holder of the replica's credentials
could:

- a segment with two round reports of ``phases: {"compute": 1e308}``, whose sum is infinite;
- a segment with 1,100 round reports of ``bytes_up = 2**53``, whose sum no integer column holds;
- three segments of 15 MB, each with 300,000 empty log lines;
- a sparse ``commit.json`` of 3 GB.

Prints one line of JSON a run: ``acknowledged_s`` until the cancellation reached the backend,
``gone_s`` until no process of the replica was left, and what was quarantined. ``--clean`` leaves
the hostile records out.

``--backends`` measures the request to end jobs at each backend's emulator instead, as the control
plane sends it (:mod:`runs.backends.parallel_calls`): ``acknowledged_s`` until ``cancel`` has
returned for three jobs, ``dead_s`` the same where the first call gets no answer and the next one, a
second later, does, and ``gone_s`` until the processes of the jobs have ended after the request. The
local backend runs replicas that ignore SIGTERM, with children in separate sessions.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from diloco.protocol import keys
from diloco.protocol.telemetry import LogLine
from diloco.store.base import LocalStore
from executors.local.options import GRACE_S
from executors.registry import BACKENDS
from runs.backends.parallel_calls import CallTimeout, call_all
from tests import stack as stacks
from tests.e2e.lives import create
from tests.executors.harnesses import is_gone, launch, number_in, open_harness, reason_without
from tests.runs.run_harness import Bucket
from tests.servers import wait_until as wait_for_condition
from tests.stack import LiveStack, running_stack

wait_until = functools.partial(wait_for_condition, timeout_s=600.0)
stacks.wait_until = wait_until  # type: ignore[assignment]  # a busy machine starts slowly

_GRANT = """
from django.contrib.auth.models import Permission, User
wanted = Permission.objects.get(content_type__app_label="runs", codename="use_local_backend")
User.objects.get(username="operator").user_permissions.add(wanted)
"""
_STOP = """
from django.contrib.auth.models import User
from runs.actions import lifecycle as life
from runs.models import Run
life.force_stop(Run.objects.get(pk={run!r}), actor=User.objects.get(username="operator"))
"""
_LOOK = """
import json
from runs.models import QuarantinedRecord, Run
run = Run.objects.get(pk={run!r})
records = QuarantinedRecord.objects.filter(run=run, quarantined_at__isnull=False)
print(json.dumps({{"state": run.state, "quarantined": records.count()}}))
"""
JOBS = 3
HANG_S = 15.0
"""Of a request without an answer: longer than the patience of the control plane."""
TICK_S = 1.0
EMPTY_LINES = 300_000
SPARSE_BYTES = 3 * 1024**3


def write_hostile_records(root: Path) -> None:
    """As an earlier process of replica 0: the one that runs is not fenced by it."""
    bucket = Bucket(LocalStore(root), wall_s=time.time())
    huge = bucket.report(1, phases={"compute": 1e308})
    many = tuple(bucket.report(n, bytes_up=2**53) for n in range(1, 1101))
    lines = tuple(LogLine(wall_s=0.0, level="", message="") for _ in range(EMPTY_LINES))
    bucket.beat(0, 1, seq=0)
    bucket.segment(0, 1, seq=0, rounds=(huge, huge))
    bucket.segment(0, 2, seq=0, rounds=many)
    for n in (3, 4, 5):
        bucket.segment(0, n, seq=0, logs=lines)
    following = max(int(p.name) for p in (root / "rounds").glob("[0-9]*")) + 1
    commit = root / keys.commit(following)
    commit.parent.mkdir(parents=True, exist_ok=True)
    with commit.open("wb") as file:
        file.truncate(SPARSE_BYTES)


def processes_of(root: Path) -> list[psutil.Process]:
    """The replica by the process id in its newest lease, and its children."""
    leases = sorted((root / "members" / "00000").glob("*/beat.json"))
    replica = psutil.Process(json.loads(leases[-1].read_text())["pid"])
    return [replica, *replica.children(recursive=True)]


def measure(stack: LiveStack, *, hostile: bool) -> dict[str, Any]:
    run = create(stack, "forced stop", num_replicas=1, total_rounds=100_000, sync_every=5)
    root = stack.var / "rendezvous" / run
    wait_until(lambda: any((root / "rounds").glob("*/commit.json")), "a first round")
    (folder,) = (stack.var / "jobs").glob(f"{run.replace('-', '')[:12]}-*")
    if hostile:
        write_hostile_records(root)
        time.sleep(5.0)  # until ingest processes them
    before = processes_of(root)
    stack.python(_STOP.format(run=run))
    since = time.monotonic()
    wait_until(lambda: (folder / "cancel").exists(), "the cancellation")
    acknowledged_s = time.monotonic() - since
    wait_until(lambda: not any(map(_runs, before)), "the end of the replica")
    gone_s = time.monotonic() - since
    seen = json.loads(stack.python(_LOOK.format(run=run)))
    return {
        "hostile": hostile,
        "acknowledged_s": round(acknowledged_s, 2),
        "gone_s": round(gone_s, 2),
        "processes": len(before),
        **seen,
    }


def measure_backend(backend: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as root, open_harness(backend, Path(root)) as harness:
        found: dict[str, Any] = {"backend": backend}
        has_server = not reason_without(backend, "server")
        for name in ("acknowledged_s", "dead_s") if has_server else ("acknowledged_s",):
            pids: list[int] = []
            local = backend == "local"
            executor = harness.executor(**({"grace_s": GRACE_S} if local else {}))
            handles = []
            for n in range(JOBS):
                paths = [Path(root) / f"{name}-{n}-{part}" for part in ("main", "rank0", "rank1")]
                args = ("deaf-sessions", *paths) if local else ("wait", paths[0])
                handles.append(launch(executor, *args, key=f"{name[0]}-{n}-1"))
                pids += [number_in(path) for path in paths[: len(args) - 1]]
            ask = {"cancel": functools.partial(executor.cancel, handles)}
            since = time.monotonic()
            if name == "dead_s":
                harness.slow(HANG_S)
                assert isinstance(call_all(ask)["cancel"], CallTimeout)
                harness.slow(0)
                time.sleep(TICK_S)
            answer = call_all(ask, patience_s=60.0)["cancel"]
            if isinstance(answer, Exception):
                raise answer
            found[name] = round(time.monotonic() - since, 2)
            wait_until(lambda pids=pids: all(map(is_gone, pids)), "the end of the jobs")
            found.setdefault("gone_s", round(time.monotonic() - since, 2))
        return found


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--clean", action="store_true")
    parser.add_argument("--backends", nargs="*", metavar="BACKEND")
    options = parser.parse_args()
    if options.backends is not None:
        for backend in options.backends or list(BACKENDS):
            print(json.dumps(measure_backend(backend)), flush=True)
        return
    with tempfile.TemporaryDirectory() as var, running_stack(Path(var)) as stack:
        stack.python(_GRANT)
        for _ in range(options.runs):
            print(json.dumps(measure(stack, hostile=not options.clean)), flush=True)


if __name__ == "__main__":
    main()
