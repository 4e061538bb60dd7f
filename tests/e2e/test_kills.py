"""Processes are killed with SIGKILL: no double launch, no hang, no double counting."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from typing import Any

import psutil
import pytest

from tests.e2e.lives import create, look, wait_for, wait_for_ingest
from tests.servers import wait_until
from tests.stack import LiveStack

pytestmark = [pytest.mark.processes, pytest.mark.slow(minutes=2)]


def workers(stack: LiveStack) -> list[psutil.Process]:
    """The processes of the Celery workers, parents and pools."""
    result = []
    for process in psutil.Process(stack.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if "worker" in words and "celery" in " ".join(words):
                result.append(process)
    return result


def jobs(stack: LiveStack, run: str) -> set[str]:
    """Launch keys of the run's jobs on the local backend."""
    short = run.replace("-", "")[:12]
    return {path.name for path in (stack.var / "jobs").glob(f"{short}-*")}


def until_read(stack: LiveStack, run: str) -> dict[str, Any]:
    """Wait until the run has succeeded and all its records are read; return its state."""
    wait_for(stack, run, lambda seen: seen["state"] == "succeeded")
    wait_for_ingest(stack, run)
    return look(stack, run)


def test_a_worker_killed_during_the_launch_launches_nothing_twice(live_stack: LiveStack) -> None:
    run = create(live_stack, "worker killed", min_quorum=2)
    # The first job's folder exists, so the launch is in progress. Kill every worker process.
    wait_until(lambda: bool(jobs(live_stack, run)), "a first launch")
    for process in workers(live_stack):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with its parent
            process.send_signal(signal.SIGKILL)
    seen = until_read(live_stack, run)
    keys = {attempt["launch_key"] for attempt in seen["attempts"]}
    assert sorted(attempt["replica__number"] for attempt in seen["attempts"]) == [0, 1]
    assert jobs(live_stack, run) == keys
    assert [c[2] for c in seen["contributions"]] == [2, 2, 2, 2]
    assert seen["points"] == 2 * 4 * 5


def test_a_replica_killed_in_a_round_is_replaced_and_the_run_ends(live_stack: LiveStack) -> None:
    # With this quorum the other replica does not end the run before the replacement is there.
    run = create(live_stack, "replica killed", total_rounds=40, num_replicas=2, min_quorum=2)
    wait_for(live_stack, run, lambda seen: seen["rounds"] >= 2)
    beats = sorted((live_stack.var / "rendezvous" / run / "members" / "00001").glob("*/beat.json"))
    os.kill(json.loads(beats[-1].read_text())["pid"], signal.SIGKILL)
    seen = until_read(live_stack, run)
    assert seen["rounds"] == 40
    assert seen["restarts"] == [0, 1]
    killed = next(a for a in seen["attempts"] if a["launch_key"].endswith("-1-1"))
    assert (killed["cause"], killed["exit_code"]) == ("error", -9)
    assert seen["contributions"][-1][2] == 2, "the replacement contributes again"
    assert {c[1] for c in seen["contributions"]} == {"committed"}
