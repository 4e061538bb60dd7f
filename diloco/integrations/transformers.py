"""Train with ``transformers.Trainer`` as a replica of a group, by one callback::

    trainer.add_callback(DiLoCoCallback(uri, replica=0, trainer=trainer))

The callback joins the group when training begins, reports every optimizer step to it, stops the
Trainer when the run ends, and leaves the group if the Trainer ends earlier. The Trainer owns model,
data, inner optimizer and learning rate. Its schedule follows the steps of the *run*, so that a
replica that joins late does not warm up again.

Of a PEFT model replicas exchange only the adapter, and the base model never leaves them: the final
weights are the adapter. ``trl.SFTTrainer`` is a Trainer, so the callback serves it too.

Trainer callbacks receive neither batches nor losses. A forward hook on the model reads the labels
and the loss instead, which is exact with gradient accumulation, padding and unequal batches.

Not supported: losses outside the model's output (label smoothing, ``compute_loss_func``),
``nn.DataParallel`` (use torchrun), DeepSpeed, FSDP1. The Trainer restores the data position of a
relaunched process (``resume_from_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from diloco.group import Group, join
from diloco.integrations.member import Member
from diloco.integrations.peft import adapter_config, is_adapted
from diloco.integrations.schedules import follow
from diloco.model.named_parameters import bare, trained

_IGNORED = -100
"""The label that Transformers' losses ignore."""
_FUSED = {"log_probs", "label_mask"}
"""Outputs of models under TRL's SFTTrainer, which computes its loss from them: log probabilities of
the labels, and where there are labels. Both are 0 elsewhere."""


class DiLoCoCallback(Member, TrainerCallback):  # type: ignore[misc]  # the base is untyped
    """Makes a Trainer a replica of the group at ``uri``.

    ``replica`` is the number of the replica, by default ``REPLICA_RANK``. With ``trainer``, rounds
    are logged through that Trainer, and its ``evaluate`` is called if it has an ``eval_dataset``,
    in the rounds given by the group's ``eval_every`` when this replica is scheduled to evaluate.
    ``options`` are those of :func:`diloco.join`; ``config`` defaults to the model's.

    After an exception in ``Trainer.train``, the replica leaves the group by :meth:`close` or at the
    end of the process.
    """

    def __init__(
        self,
        uri: str,
        *,
        replica: int | None = None,
        trainer: Trainer | None = None,
        **options: Any,
    ) -> None:
        self._uri = uri
        self._replica = replica
        self._trainer = trainer
        self._options = options
        self._meter: _Meter | None = None
        self._logged_round = 0
        self._final: list[Tensor] = []

    # -- Trainer events --------------------------------------------------------------------------

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> TrainerControl:
        self.close()
        _check(args)
        model, optimizer, scheduler = (
            kwargs[name] for name in ("model", "optimizer", "lr_scheduler")
        )
        self._meter = meter = _Meter(bare(model))
        is_adapter = self._options.get("publish") != "model" and is_adapted(model)
        options: dict[str, Any] = {
            "config": adapter_config(model) if is_adapter else _config(model),
            "publish": "exchanged" if is_adapter else "model",
            "stateful": {"lr_scheduler": scheduler},
        }
        if self._trainer is not None and self._trainer.eval_dataset is not None:
            options["evaluate"] = self._evaluate
        try:
            group = self._enter(
                join(
                    self._uri,
                    replica=self._replica,
                    model=model,
                    # accelerate's wrapper can skip steps; the wrapped optimizer has the state.
                    inner_optimizer=getattr(optimizer, "optimizer", optimizer),
                    **{**options, **self._options},
                )
            )
        except BaseException:
            meter.remove()
            raise
        self._logged_round = group.round - 1
        follow(scheduler, group.schedule_step)
        if group.done:  # the run has ended; the Trainer checks the flag only after a step
            control.should_training_stop = True
            self._final = [parameter.detach().clone() for _, parameter in trained(model)]
        return control

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> TrainerControl:
        group, meter = self.group, self._meter
        assert group is not None and meter is not None
        if group.done:
            with torch.no_grad():
                parameters = trained(kwargs["model"])
                for (_, parameter), final in zip(parameters, self._final, strict=True):
                    parameter.copy_(final)
            control.should_training_stop = True
            return control
        tokens, loss = meter.take()
        lr = kwargs["optimizer"].param_groups[0]["lr"]
        wanted = control.should_log, control.should_evaluate  # logging and evaluating reset these
        try:
            continues = group.step(tokens=tokens, loss=loss, lr=lr)
        except BaseException as error:
            self.close(error)
            raise
        self._log(group)
        control.should_log, control.should_evaluate = wanted
        follow(kwargs["lr_scheduler"], group.schedule_step)
        if not continues:
            control.should_training_stop = True
        return control

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        self.close()

    # -- ending ----------------------------------------------------------------------------------

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group, because of ``error`` if one is given. Can be called twice."""
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.remove()
        super().close(error)

    # -- with a Trainer --------------------------------------------------------------------------

    def _evaluate(self) -> tuple[float, int]:
        assert self._trainer is not None and self._meter is not None
        self._meter.evaluated = 0
        metrics = self._trainer.evaluate()
        return float(metrics["eval_loss"]), int(self._meter.evaluated)

    def _log(self, group: Group) -> None:
        """Log each applied round once through the Trainer."""
        if self._trainer is None or not isinstance(group, Group):
            return  # only the leader of several ranks has the rounds
        commit = group._loop.state.last_commit
        if commit is None or commit.round <= self._logged_round:
            return
        self._logged_round = commit.round
        included = any(member.replica == group.identity.replica for member in commit.contributors)
        self._trainer.log(
            {
                "diloco/round": commit.round,
                "diloco/outcome": "void" if commit.void else "included" if included else "late",
                "diloco/contributors": len(commit.contributors),
                "diloco/tokens_total": commit.tokens_total,
                "diloco/loss": commit.loss,
            }
        )


class _Meter:
    """Reads labels and losses of a model's forward passes by a hook.

    ``evaluated`` counts the tokens of passes without gradients since it was last set to 0.
    """

    def __init__(self, model: nn.Module) -> None:
        self.evaluated: Tensor | int = 0
        self._shifted = _shifts_labels(model)
        self._loss_sum: Tensor | float = 0.0
        self._tokens: Tensor | int = 0
        self._handle = model.register_forward_hook(self._see, with_kwargs=True)

    def remove(self) -> None:
        self._handle.remove()

    def take(self) -> tuple[int, Tensor]:
        """Return the tokens and the mean loss (nats per token, fp32 scalar) since the last call.

        Synchronises with the device, as the Trainer does in every step to filter NaN losses.
        """
        tokens, self._tokens = int(self._tokens), 0
        total, self._loss_sum = self._loss_sum, 0.0
        if tokens == 0:
            raise ValueError("expected a step with tokens to predict, found none in its labels")
        return tokens, torch.as_tensor(total, dtype=torch.float32) / tokens

    def _see(
        self, model: nn.Module, args: tuple[Any, ...], inputs: Mapping[str, Any], output: Any
    ) -> None:
        tokens = self._count(inputs)
        if not (model.training and torch.is_grad_enabled()):
            self.evaluated = self.evaluated + tokens
            return
        if isinstance(output, Mapping) and output.keys() >= _FUSED:
            self._tokens = self._tokens + output["label_mask"].sum()
            self._loss_sum = self._loss_sum - output["log_probs"].detach().float().sum()
            return
        loss = output.get("loss") if isinstance(output, Mapping) else output[0]
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                "expected a loss in the model's output, found none: label smoothing and "
                "compute_loss_func are not supported by DiLoCoCallback"
            )
        # Transformers' losses are sums divided by num_items_in_batch if it is given, else means.
        divisor = inputs.get("num_items_in_batch")
        self._loss_sum = self._loss_sum + loss.detach().float() * (
            tokens if divisor is None else divisor
        )
        self._tokens = self._tokens + tokens

    def _count(self, inputs: Mapping[str, Any]) -> Tensor | int:
        """Count the labels over which the loss averages (int64 scalar)."""
        if (shifted := inputs.get("shift_labels")) is not None:
            return _count_labels(shifted)
        if (labels := inputs.get("labels")) is not None:
            return _count_labels(labels[..., 1:] if self._shifted else labels)
        main = inputs.get("input_ids")
        return 0 if main is None else int(main.numel())


def _count_labels(labels: Tensor) -> Tensor:
    return labels.ne(_IGNORED).sum()


def _shifts_labels(model: nn.Module) -> bool:
    """Return whether the model's loss predicts label t + 1 at position t.

    Decided by the loss function: for models whose class is not named ...ForCausalLM, such as
    GPT-2's, the Trainer counts the first label as predicted.
    """
    base = getattr(model, "get_base_model", None)  # a PEFT wrapper
    inside = base() if callable(base) else model
    if getattr(getattr(inside, "config", None), "is_encoder_decoder", False):
        return False
    return getattr(inside, "loss_function", None) is ForCausalLMLoss


def _check(args: TrainingArguments) -> None:
    if args.n_gpu > 1:
        raise ValueError(
            f"expected one process for each GPU (torchrun), found one for {args.n_gpu} GPUs"
        )
    if args.label_smoothing_factor:
        raise ValueError(
            f"label_smoothing_factor: expected 0, found {args.label_smoothing_factor}: "
            "DiLoCoCallback needs the loss of the model's output"
        )
    if args.deepspeed:
        raise ValueError("expected a Trainer without DeepSpeed, found one with it")


def _config(model: nn.Module) -> dict[str, Any]:
    """Return the ``config.json`` that ``from_pretrained`` reads."""
    inside = bare(model)
    describe = getattr(getattr(inside, "config", None), "to_dict", None)
    if not callable(describe):
        return {}
    return {**describe(), "architectures": [type(inside).__name__]}
