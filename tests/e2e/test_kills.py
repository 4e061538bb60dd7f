"""Real processes killed with SIGKILL: no double launch, no hang, nothing counted twice."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.servers import wait_until
from tests.stack import LiveStack

pytestmark = pytest.mark.processes

_CREATE = """
import secrets
from django.contrib.auth.models import User
from diloco.rendezvous.settings import GroupSettings
from diloco.rendezvous.workload import ByteGPTWorkload
from runs.presets import PoolDraft, RunDraft
from runs.services import create_run
settings = GroupSettings(**{settings!r})
draft = RunDraft(
    name={name!r}, settings=settings, workload=ByteGPTWorkload(size="demo", eval_bytes=4096),
    pools=(PoolDraft(count=settings.num_replicas),),
)
owner = User.objects.get(username="operator")
print(create_run(draft, owner=owner, submit_key=secrets.token_hex()).pk)
"""

_LOOK = """
import json
from runs.models import ReplicaAttempt, Run
run = Run.objects.get(pk={run!r})
print(json.dumps({{
    "state": run.state,
    "reason": run.state_reason,
    "rounds": run.committed_rounds,
    "attempts": list(
        ReplicaAttempt.objects.filter(replica__run=run).order_by("launch_key")
        .values("launch_key", "replica__number", "cause", "exit_code", "handle")
    ),
    "contributions": [
        [r.number, r.state, r.contributions.filter(state="included").count()]
        for r in run.rounds.order_by("number")
    ],
    "points": sum(b.count for b in run.metric_blocks.filter(series="loss")),
    "restarts": [r.restarts for r in run.replicas.order_by("number")],
}}))
"""


def create(stack: LiveStack, name: str, **settings: Any) -> str:
    chosen = {
        "num_replicas": 2, "sync_every": 5, "total_rounds": 4, "warmup_steps": 0, "batch_size": 2,
        "heartbeat_timeout_s": 6.0, "round_timeout_s": 120.0, "start_wait_s": 60.0, **settings,
    }  # fmt: skip
    return stack.python(_CREATE.format(name=name, settings=chosen))


def look(stack: LiveStack, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(stack.python(_LOOK.format(run=run)))
    return found


def wait_for(stack: LiveStack, run: str, ready: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def check() -> bool:
        seen.update(look(stack, run))
        assert seen["state"] not in ("failed", "cancelled"), seen["reason"]
        return ready(seen)

    wait_until(check, f"run {run}", timeout_s=120)
    return seen


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
    seen = wait_for(live_stack, run, lambda seen: seen["state"] == "succeeded")
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
    assert (killed["cause"], killed["exit_code"]) == ("lost", -9)
    assert seen["contributions"][-1][2] == 2, "the replacement contributes again"
    assert {c[1] for c in seen["contributions"]} == {"committed"}
