"""Learning rate schedules that follow the steps of the run."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR


def follow(scheduler: Any, step: int) -> None:
    """Set the learning rates to those of step ``step`` of the run, counted from 0.

    Applies to ``LambdaLR``, e.g. all of Transformers' schedules except those that monitor a metric.
    Schedules of other classes depend on their own past and are not changed.
    """
    if not isinstance(scheduler, LambdaLR) or scheduler.last_epoch == step:
        return
    scheduler.last_epoch = step
    rates = [
        base * factor(step)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for settings, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        settings["lr"] = rate
    scheduler._last_lr = rates
