"""Attempts of the last days on several backends, and orphaned jobs.

Extends the runs of :mod:`tests.browser.seed`.
"""

from __future__ import annotations

import datetime
import uuid
from typing import Any

HOUR = datetime.timedelta(hours=1)


def attempt(
    replica: Any,
    *,
    number: int,
    start: datetime.datetime,
    end: datetime.datetime | None,
    price: float | None,
    **fields: Any,
) -> Any:
    """An attempt that ran from ``start`` to ``end`` (None: it still runs) at a price."""
    from runs import models

    until = end or datetime.datetime.now(datetime.UTC)
    cost = None if price is None else price * (until - start) / HOUR
    return models.ReplicaAttempt.objects.create(
        **{
            "replica": replica,
            "number": number,
            "launch_key": f"{replica.run_id.hex[:12]}-{replica.number}-{number}",
            "handle": {
                "backend": replica.pool.backend,
                "launch_key": f"{replica.run_id.hex[:12]}-{replica.number}-{number}",
                "data": {"job_id": f"job-{replica.number:04d}"},
            },
            "created_at": start,
            "launched_at": start,
            "started_at": start,
            "ended_at": end,
            "price_usd_h": price,
            "cost_usd": cost,
        }
        | fields
    )


def history(run: Any, *, days: int, price: float | None, backend: str, tags: list[str]) -> Any:
    """A job of every replica on each of the last ``days`` days, the newest of which still run."""
    from runs import models

    models.ReplicaPool.objects.filter(run=run).update(
        backend=backend, hardware="H100", price_usd_h=price
    )
    models.Run.objects.filter(pk=run.pk).update(tags=tags)
    now = datetime.datetime.now(datetime.UTC)
    for replica in run.replicas.select_related("pool"):
        for day in range(days - 1, -1, -1):
            start = now - datetime.timedelta(days=day, hours=9)
            end = start + (5 + replica.number + day % 3) * HOUR if day else None
            attempt(replica, number=days - day, start=start, end=end, price=price)
    return run


def orphans(run: Any) -> None:
    """A job whose attempt has ended, and one of a deleted run."""
    from runs import models

    now = datetime.datetime.now(datetime.UTC)
    replica = run.replicas.select_related("pool").order_by("number").last()
    ended = attempt(replica, number=99, start=now - 5 * HOUR, end=now - 2 * HOUR, price=4.0)
    for key, reason, of in (
        (ended.launch_key, "its attempt has ended", ended),
        ("0123456789ab-3-1", "no attempt has its launch key", None),
    ):
        models.OrphanJob.objects.create(
            key=uuid.uuid4().hex,
            backend="modal",
            launch_key=key,
            reason=reason,
            attempt=of,
            billed_from=now - 2 * HOUR,
            first_seen_at=now - 2 * HOUR,
            seen_at=now,
        )


def fleet(owner: Any, other: Any) -> None:
    """Runs of two owners on five backends, with trouble and orphans."""
    from tests.browser import seed, seed_fleet

    seed_fleet.mixed(owner, name="Five backends")
    priced = seed.run(owner, name="Priced", replicas=3, committed=2)
    history(priced, days=6, price=3.95, backend="modal", tags=["paper", "sweep"])
    unpriced = seed.run(other, name="On our cluster", replicas=2, committed=2)
    history(unpriced, days=3, price=None, backend="kubernetes", tags=["paper"])
    cheap = seed.run(
        other,
        name="A run with a very long name that shows how pages wrap and truncate it",
        replicas=2,
        committed=2,
    )
    history(cheap, days=9, price=1.2, backend="sagemaker", tags=[])
    waiting = cheap.replicas.get(number=1)
    type(waiting).objects.filter(pk=waiting.pk).update(
        state="provisioning",
        pending_cause="capacity",
        pending_since=datetime.datetime.now(datetime.UTC) - HOUR,
        state_reason="InsufficientInstanceCapacity: no ml.p5.48xlarge in eu-central-1",
    )
    waiting.attempts.filter(ended_at=None).update(started_at=None, cost_usd=None)
    orphans(priced)
