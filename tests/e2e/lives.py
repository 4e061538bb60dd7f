"""Create and observe runs on the live stack from another process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.servers import wait_until
from tests.stack import LiveStack

POLL_S = 0.25
"""Between two looks at the database. Each takes CPU time from the server and the replicas."""

_CREATE = """
import secrets
from django.contrib.auth.models import User
from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import ByteGPTWorkload
from runs.submit.run_draft import PoolDraft, RunDraft
from runs.submit.create import create_run
settings = GroupSettings(**{settings!r})
draft = RunDraft(
    name={name!r}, settings=settings,
    workload=ByteGPTWorkload(size="demo", data={data!r}, eval_bytes=4096),
    pools=tuple(PoolDraft(**pool) for pool in {pools!r}), rendezvous={rendezvous!r},
)
owner = User.objects.get(username={owner!r})
print(create_run(draft, owner=owner, submit_key=secrets.token_hex()).pk)
"""

_LOOK = """
import json
from runs.models import LogLine, ReplicaAttempt, Run
run = Run.objects.get(pk={run!r})
print(json.dumps({{
    "state": run.state,
    "reason": run.state_reason,
    "rounds": run.committed_rounds,
    "attempts": list(
        ReplicaAttempt.objects.filter(replica__run=run).order_by("launch_key")
        .values(
            "launch_key", "replica__number", "replica__pool__backend", "cause", "exit_code",
            "handle", "cost_usd",
        )
    ),
    "cost_usd": run.cost_usd,
    "rendezvous": run.rendezvous,
    "contributions": [
        [r.number, r.state, r.contributions.filter(state="included").count()]
        for r in run.rounds.order_by("number")
    ],
    "points": sum(b.count for b in run.metric_blocks.filter(series="loss", level=0)),
    "events": list(run.events.values("level", "kind", "message", "replica__number")),
    "logs": list(LogLine.objects.filter(replica__run=run).values_list("message", flat=True)),
    "restarts": [r.restarts for r in run.replicas.order_by("number")],
}}))
"""

_INGESTED = """
from runs.queries import selectors
print(not selectors.runs_to_reconcile().filter(pk__in={runs!r}).exists())
"""


def create(
    stack: LiveStack,
    name: str,
    *,
    data: str = "stdlib",
    rendezvous: str = "",
    pools: list[dict[str, Any]] | None = None,
    owner: str = "operator",
    **settings: Any,
) -> str:
    """Create a run without preflight checks; return its id."""
    chosen = {
        "num_replicas": 2,
        "sync_every": 5,
        "total_rounds": 4,
        "warmup_steps": 0,
        "batch_size": 2,
        "heartbeat_timeout_s": 6.0,
        "round_timeout_s": 600.0,
        "start_wait_s": 300.0,
        **settings,
    }
    return stack.python(
        _CREATE.format(
            name=name,
            settings=chosen,
            data=data,
            owner=owner,
            rendezvous=rendezvous,
            pools=pools or [{"count": chosen["num_replicas"]}],
        )
    )


def look(stack: LiveStack, run: str) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(stack.python(_LOOK.format(run=run)))
    return state


def wait_for(
    stack: LiveStack,
    run: str,
    ready: Callable[[dict[str, Any]], bool],
) -> dict[str, Any]:
    """Wait until ``ready`` accepts the run's state; fail if the run fails."""
    seen: dict[str, Any] = {}

    def check() -> bool:
        seen.update(look(stack, run))
        assert seen["state"] not in ("failed", "cancelled"), seen["reason"]
        return ready(seen)

    wait_until(check, f"run {run}", every_s=POLL_S)
    return seen


def wait_for_failure(stack: LiveStack, run: str) -> dict[str, Any]:
    """Wait until the run has failed; return its state."""
    seen: dict[str, Any] = {}

    def has_failed() -> bool:
        seen.update(look(stack, run))
        return bool(seen["state"] == "failed")

    wait_until(has_failed, f"the failure of run {run}", every_s=POLL_S)
    return seen


def wait_for_ingest(stack: LiveStack, *runs: str) -> None:
    """Wait until the server has read all records of runs that have ended."""
    code = _INGESTED.format(runs=list(runs))
    wait_until(lambda: stack.python(code) == "True", "the end of ingest", every_s=POLL_S)
