"""Sweeps for the pages and their tests, without a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.browser import seed


def sweep(
    owner: Any,
    losses: Sequence[float | None],
    *,
    name: str = "Rates",
    values: Sequence[Any] | None = None,
    field: str = "settings.inner_lr",
) -> Any:
    """Create a sweep with a run for each evaluation loss. ``values`` are those of ``field``, by
    default 0, 1, 2, ..."""
    from django.utils import timezone

    from runs.models import Run, Sweep

    values = list(range(len(losses))) if values is None else values
    row = Sweep.objects.create(
        name=name,
        owner=owner,
        parameters=[{"field": field, "values": list(values)}],
        metric="eval_loss",
        submit_key=f"k{Sweep.objects.count()}",
        created_at=timezone.now(),
    )
    for index, (loss, value) in enumerate(zip(losses, values, strict=True)):
        run = seed.run(owner, name=f"{name} {index}", replicas=1)
        Run.objects.filter(pk=run.pk).update(
            sweep=row,
            sweep_index=index,
            sweep_values={field: value},
            eval_loss=loss,
            cost_usd=1.5,
        )
    return row
