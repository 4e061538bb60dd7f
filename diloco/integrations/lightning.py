"""Train with Lightning's ``Trainer`` as a replica of a group, by one callback::

    Trainer(max_epochs=-1, callbacks=[DiLoCoCallback(uri)]).fit(module, loader)

The callback joins the group when training begins, reports every optimizer step to it, stops the
Trainer when the run ends, and leaves the group if the Trainer ends earlier. The module owns model,
optimizers and learning rate. Schedules of the class ``LambdaLR`` follow the steps of the *run*.

A ``training_step`` returns its mean loss, or a mapping with the key ``loss``. With accumulated
gradients, tokens and losses of all batches of an optimizer step count. Not supported: FSDP1 and
DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from diloco.group import join
from diloco.integrations.member import Member
from diloco.integrations.schedules import follow
from diloco.training.progress import RoundProgress


class DiLoCoCallback(Member, Callback):  # type: ignore[misc]  # the base is untyped
    """Makes a Lightning Trainer a replica of the group at ``uri``.

    ``tokens`` returns the tokens (or samples) of a batch, by default the rows of its first tensor.
    ``options`` are those of :func:`diloco.join`, e.g. ``settings`` or ``replica``.

    Round, contributors, tokens of the run and mean loss of each round are logged through the
    Trainer as ``diloco/round`` and so on.
    """

    def __init__(
        self, uri: str, *, tokens: Callable[[Any], int] | None = None, **options: Any
    ) -> None:
        self._uri = uri
        self._count = tokens or _rows
        self._options = options
        self._steps_seen = 0
        self._tokens = 0
        self._loss_sum: Tensor | float = 0.0
        self._round: RoundProgress | None = None

    # -- events of the Trainer -------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close()
        _check(trainer)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        stateful = {f"lr_scheduler.{n}": scheduler for n, scheduler in enumerate(schedulers)}
        group = self._enter(
            join(
                self._uri,
                pl_module,
                list(trainer.optimizers),
                **{"stateful": stateful, **self._options},
            )
        )
        self._steps_seen = trainer.global_step
        if group.done:  # the run has ended; the module has its final weights
            trainer.should_stop = True
            return
        group.register_round_hook(after=self._keep)
        self._follow(trainer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Any,
        batch_idx: int,
    ) -> None:
        group = self.group
        assert group is not None
        tokens = self._count(batch)
        self._tokens += tokens
        self._loss_sum = self._loss_sum + _loss(outputs) * tokens
        if trainer.global_step == self._steps_seen:
            return  # gradients are accumulated
        self._steps_seen = trainer.global_step
        total, self._tokens = self._tokens, 0
        mean, self._loss_sum = self._loss_sum / max(1, total), 0.0
        if not group.step(tokens=total, loss=mean):
            trainer.should_stop = True
        self._follow(trainer)
        self._log(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.close(exception)

    # -- with the Trainer ------------------------------------------------------------------------

    def _keep(self, progress: RoundProgress) -> None:
        self._round = progress

    def _follow(self, trainer: Trainer) -> None:
        assert self.group is not None
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                follow(config.scheduler, self.group.schedule_step)

    def _log(self, module: LightningModule) -> None:
        """Log the newest applied round once."""
        progress, self._round = self._round, None
        if progress is None:
            return
        values = {
            "diloco/round": float(progress.round),
            "diloco/contributors": float(progress.contributors),
            "diloco/tokens": float(progress.tokens),
        }
        if progress.loss is not None:
            values["diloco/loss"] = progress.loss
        module.log_dict(values, on_step=True, on_epoch=False)


def _rows(batch: Any) -> int:
    """Return the size of the first dimension of the first tensor of a batch."""
    leaves = [batch]
    while leaves:
        leaf = leaves.pop(0)
        if isinstance(leaf, Tensor):
            return leaf.shape[0] if leaf.dim() else 1
        if isinstance(leaf, Mapping):
            leaves[:0] = leaf.values()
        elif isinstance(leaf, list | tuple):
            leaves[:0] = leaf
    raise ValueError(
        f"expected a tensor in each batch, found {type(batch).__name__}. Pass "
        "DiLoCoCallback(tokens=...), a function that returns the tokens of a batch"
    )


def _loss(outputs: Tensor | Mapping[str, Any] | None) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            "expected training_step to return its loss, or a mapping with the key 'loss', found "
            f"{type(outputs).__name__}"
        )
    return loss.detach().float().reshape(())


def _check(trainer: Trainer) -> None:
    """Raise :class:`ValueError` for a Trainer that would train on after the end of the run."""
    for name in ("min_steps", "min_epochs"):
        if getattr(trainer, name):
            raise ValueError(
                f"{name}: expected none, because the group decides when training ends, found "
                f"{getattr(trainer, name)}"
            )
