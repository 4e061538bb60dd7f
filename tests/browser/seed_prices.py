"""Adds costs to runs of :mod:`tests.browser.seed`."""

from __future__ import annotations

from typing import Any


def unpriced(run: Any) -> Any:
    """Create a running job without a known price for the first replica."""
    from runs import models

    models.ReplicaAttempt.objects.create(
        replica=run.replicas.first(),
        number=1,
        launch_key=f"{run.pk}-0-1",
        created_at=run.created_at,
        launched_at=run.created_at,
        started_at=run.first_step_at,
        ended_at=run.ended_at,
    )
    return run


def priced(run: Any, usd_h: float, *, backend: str = "modal") -> Any:
    """Create an attempt for each replica, from the first step to the end of the run."""
    from runs import models

    models.ReplicaPool.objects.filter(run=run).update(price_usd_h=usd_h, backend=backend)
    hours = ((run.ended_at or run.state_since) - run.first_step_at).total_seconds() / 3600
    replicas = list(run.replicas.all())
    for replica in replicas:
        models.ReplicaAttempt.objects.create(
            replica=replica,
            number=1,
            launch_key=f"{run.pk}-{replica.number}-1",
            created_at=run.created_at,
            launched_at=run.created_at,
            started_at=run.first_step_at,
            ended_at=run.ended_at,
            price_usd_h=usd_h,
            cost_usd=usd_h * hours,
        )
    models.Run.objects.filter(pk=run.pk).update(cost_usd=usd_h * hours * len(replicas))
    return run
