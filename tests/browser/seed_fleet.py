"""Runs on several backends: pools in all breaker states, and attempts with all causes.

Extends the runs of :mod:`tests.browser.seed`.
"""

from __future__ import annotations

import datetime
from typing import Any

from tests.browser import seed

QUOTA = (
    "You have exceeded your current quota of 2 GPUs of type H100 in workspace acme-research. "
    "Request an increase under Settings, Usage and billing."
)
DOWN = "503 Service Unavailable: the job controller is restarting"

# backend, hardware, region, spot, price, replicas
POOLS = (
    ("local", "cpu", "", False, 0.0, 2),
    ("modal", "H100", "us-east", False, 3.95, 3),
    ("huggingface", "a10g-large", "", False, 1.5, 2),
    ("sagemaker", "ml.g5.2xlarge", "eu-central-1", True, None, 2),
    ("kubernetes", "gpu", "", False, 0.8, 1),
)
CAUSES = (
    ("preempted", None, "Spot instance was taken back"),
    ("out_of_memory", 137, "OOMKilled: the container used more than its 24Gi"),
    ("error", 1, "Traceback: RuntimeError: CUDA error: an illegal memory access was encountered"),
    ("deadline", None, "Exceeded its timeout of 3600 s"),
)


def mixed(owner: Any, **options: Any) -> Any:
    """A run on five backends: one pool requires intervention, one has an open circuit breaker."""
    from runs import models

    run = seed.run(
        owner, **({"name": "Five backends", "replicas": 10, "state": "degraded"} | options)
    )
    now = datetime.datetime.now(datetime.UTC)
    replicas = list(run.replicas.order_by("number"))
    first = run.pools.get()
    for index, (backend, hardware, region, spot, price, count) in enumerate(POOLS):
        fields = {
            "backend": backend,
            "hardware": hardware,
            "region": region,
            "spot": spot,
            "price_usd_h": price,
            "count": count,
        }
        if index == 0:
            models.ReplicaPool.objects.filter(pk=first.pk).update(**fields)
            pool = first
        else:
            pool = models.ReplicaPool.objects.create(run=run, **fields)
        members, replicas = replicas[:count], replicas[count:]
        for replica in members:
            models.Replica.objects.filter(pk=replica.pk).update(pool=pool)
            attempts(replica, backend=backend, price=price, earlier=replica.number % 4, now=now)
    models.ReplicaPool.objects.filter(run=run, backend="modal").update(
        requires_intervention=True, failures=1, last_error=QUOTA
    )
    models.ReplicaPool.objects.filter(run=run, backend="kubernetes").update(
        failures=4, open_until=now + datetime.timedelta(seconds=95), last_error=DOWN
    )
    models.Run.objects.filter(pk=run.pk).update(cost_usd=12.3456, budget_usd=15.0)
    waiting = models.Replica.objects.filter(run=run, pool__backend="kubernetes")
    waiting.update(state="restarting", state_reason=f"restart 2 of 3 in 8 s, after: {DOWN}")
    run.refresh_from_db()
    return run


def attempts(replica: Any, *, backend: str, price: float | None, earlier: int, now: Any) -> None:
    """Create ``earlier`` ended attempts and a running one."""
    from runs import models

    for number in range(1, earlier + 2):
        is_running = number == earlier + 1
        began = now - datetime.timedelta(minutes=47 * (earlier + 2 - number))
        ended = None if is_running else began + datetime.timedelta(minutes=44)
        cause, exit_code, message = (
            ("", None, "") if is_running else CAUSES[(number - 1) % len(CAUSES)]
        )
        hours = ((ended or now) - began).total_seconds() / 3600
        models.ReplicaAttempt.objects.create(
            replica=replica,
            number=number,
            launch_key=f"{replica.run_id.hex[:12]}-{replica.number}-{number}",
            handle={
                "backend": backend,
                "launch_key": f"{replica.run_id.hex[:12]}-{replica.number}-{number}",
                "data": {"job_id": f"{backend}-7f3c{number:04d}{replica.number:04d}"},
            },
            cause=cause,
            exit_code=exit_code,
            message=message,
            created_at=began - datetime.timedelta(seconds=40),
            launched_at=began - datetime.timedelta(seconds=38),
            started_at=began,
            ended_at=ended,
            deadline_at=None if backend == "local" else began + datetime.timedelta(hours=1),
            price_usd_h=price,
            cost_usd=None if price is None else price * hours,
        )
