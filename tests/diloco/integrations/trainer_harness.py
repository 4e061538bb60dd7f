"""Trainers of transformers in a group, for tests.

A separate module, because importing transformers takes seconds: tests import it when they run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from diloco.integrations.transformers import DiLoCoCallback
from tests.diloco.clocks import FastClock
from tests.diloco.conftest import TinyGroup

PATIENCE_S = 900

VOCABULARY, TIME = 32, 12


def tiny_model(seed: int) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=TIME,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    return GPT2LMHeadModel(config)


def rows(replica: int, n: int = 64) -> list[dict[str, Tensor]]:
    """Runs of consecutive numbers, whose last ``replica`` labels are not predicted."""
    random = torch.Generator().manual_seed(replica)
    result = []
    for start in torch.randint(0, VOCABULARY, (n,), generator=random):
        tokens = (start + torch.arange(TIME)) % VOCABULARY
        labels = tokens.clone()
        labels[TIME - replica :] = -100
        result.append({"input_ids": tokens, "labels": labels})
    return result


@dataclass
class Training:
    """A Trainer in a thread, and its result."""

    trainer: Trainer
    callback: DiLoCoCallback
    error: BaseException | None = None
    thread: threading.Thread = field(init=False)

    def run(self) -> None:
        try:
            self.trainer.train()
        except BaseException as error:
            self.error = error

    def start(self) -> Training:
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        return self

    def wait(self) -> None:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error

    @property
    def reason(self) -> str:
        assert self.callback.group is not None
        return self.callback.group.reason

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return [entry for entry in self.trainer.state.log_history if "diloco/round" in entry]


class Watch(TrainerCallback):  # type: ignore[misc]
    """Calls a function after each step, before the group counts it."""

    def __init__(self, on_step: Callable[[Trainer, Any], None]) -> None:
        self.on_step = on_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_step(state, kwargs)


def make_training(
    folder: Path,
    group: TinyGroup,
    replica: int,
    *,
    seed: int | None = None,
    model: nn.Module | None = None,
    max_steps: int = 40,
    on_step: Callable[[Any, Any], None] | None = None,
    **arguments: Any,
) -> Training:
    trainer = Trainer(
        model=model or tiny_model(100 + replica if seed is None else seed),
        args=TrainingArguments(
            output_dir=str(folder / f"trainer-{replica}"),
            max_steps=max_steps,
            per_device_train_batch_size=4,
            learning_rate=3e-3,
            logging_steps=1,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=replica,
            **arguments,
        ),
        train_dataset=rows(replica),
        eval_dataset=rows(7, 8),
    )
    callback = DiLoCoCallback(str(group.root), replica=replica, trainer=trainer, clock=FastClock())
    if on_step is not None:
        trainer.add_callback(Watch(on_step))
    trainer.add_callback(callback)
    return Training(trainer, callback)
