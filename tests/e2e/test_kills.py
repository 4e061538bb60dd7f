"""Real processes killed with SIGKILL: no double launch, no hang, nothing counted twice."""

from __future__ import annotations

import json
import os
import signal

import psutil
import pytest

from tests.e2e.lives import create, wait_for
from tests.servers import wait_until
from tests.stack import LiveStack

pytestmark = pytest.mark.processes


def workers(stack: LiveStack) -> list[psutil.Process]:
    """The Celery worker's processes, parent and pool."""
    children = psutil.Process(stack.pid).children(recursive=True)
    return [p for p in children if "worker" in p.cmdline() and "celery" in " ".join(p.cmdline())]


def jobs(stack: LiveStack, run: str) -> set[str]:
    """Launch keys that the local backend has a job of."""
    short = run.replace("-", "")[:12]
    return {path.name for path in (stack.var / "jobs").glob(f"{short}-*")}


def test_a_worker_killed_during_the_launch_launches_nothing_twice(live_stack: LiveStack) -> None:
    run = create(live_stack, "worker killed")
    # The first job's folder is there: the launch is under way. Kill every worker process at once.
    wait_until(lambda: bool(jobs(live_stack, run)), "a first launch")
    for process in workers(live_stack):
        process.send_signal(signal.SIGKILL)
    # A replica's last words may come after the manifest that another wrote.
    seen = wait_for(
        live_stack, run, lambda seen: seen["state"] == "succeeded" and seen["points"] >= 40
    )
    keys = {attempt["launch_key"] for attempt in seen["attempts"]}
    assert sorted(attempt["replica__number"] for attempt in seen["attempts"]) == [0, 1]
    assert jobs(live_stack, run) == keys
    assert [c[2] for c in seen["contributions"]] == [2, 2, 2, 2]
    assert seen["points"] == 2 * 4 * 5


def test_a_replica_killed_in_a_round_is_replaced_and_the_run_ends(live_stack: LiveStack) -> None:
    run = create(live_stack, "replica killed", total_rounds=40, num_replicas=2)
    wait_for(live_stack, run, lambda seen: seen["rounds"] >= 2)
    beats = sorted((live_stack.var / "rendezvous" / run / "members" / "00001").glob("*/beat.json"))
    os.kill(json.loads(beats[-1].read_text())["pid"], signal.SIGKILL)
    seen = wait_for(live_stack, run, lambda seen: seen["state"] == "succeeded")
    assert seen["rounds"] == 40
    assert seen["restarts"] == [0, 1]
    killed = next(a for a in seen["attempts"] if a["launch_key"].endswith("-1-1"))
    assert (killed["cause"], killed["exit_code"]) == ("error", -9)
    assert seen["contributions"][-1][2] == 2, "the replacement contributes again"
    assert {c[1] for c in seen["contributions"]} == {"committed"}
