"""Trainers in a group: threads with separate models and a shared folder."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from diloco.errors import ReplicaError
from diloco.training.final_result import read_final
from diloco.training.stored_objects import load_tensors
from tests.diloco.conftest import TinyGroup
from tests.matrix import matrix

if TYPE_CHECKING:
    from tests.diloco.integrations.trainer_harness import Training

MakeGroup = Callable[..., TinyGroup]


@pytest.fixture
def make_training(tmp_path: Path) -> Callable[..., Training]:
    from tests.diloco.integrations import trainer_harness

    return functools.partial(trainer_harness.make_training, tmp_path)


def run_together(*trainings: Training) -> None:
    """Create all Trainers before the first starts, because creating one resets the global state of
    accelerate."""
    for training in trainings:
        training.start()
    for training in trainings:
        training.wait()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_two_trainers_end_with_the_same_weights(
    tiny_group: MakeGroup, make_training: Callable[..., Training]
) -> None:
    from tests.diloco.integrations.trainer_harness import tiny_model

    group = tiny_group(num_replicas=2, sync_every=3, total_rounds=4, eval_every=1)
    trainings = [make_training(group, replica) for replica in range(2)]
    run_together(*trainings)
    one, other = (weights(training.trainer.model) for training in trainings)
    assert torch.equal(one, other)
    assert not torch.equal(one, weights(tiny_model(100)))
    for training in trainings:
        assert training.reason == "completed"
        assert training.trainer.state.global_step == 12  # of 40: the group had ended
        assert [entry["diloco/round"] for entry in training.rounds] == [1, 2, 3, 4]
        assert {entry["diloco/outcome"] for entry in training.rounds} == {"included"}
        # The Trainer's logging continues.
        assert len([e for e in training.trainer.state.log_history if "grad_norm" in e]) == 12
    evaluations = [
        entry["eval_loss"]
        for t in trainings
        for entry in t.trainer.state.log_history
        if "eval_loss" in entry
    ]
    assert len(evaluations) == 4  # one per round, by the scheduled replica
    final = read_final(group.store)
    assert final is not None
    published = load_tensors(group.store, final.weights)
    state = trainings[0].trainer.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in published.items())


def test_tokens_and_losses_are_those_of_the_labels(
    tiny_group: MakeGroup, make_training: Callable[..., Training]
) -> None:
    from tests.diloco.integrations.trainer_harness import TIME

    group = tiny_group(num_replicas=1, sync_every=2, total_rounds=1)
    training = make_training(group, 2, gradient_accumulation_steps=2)
    expected: list[Tensor] = []
    model = training.trainer.model

    def loss_by_hand(module: nn.Module, args: Any, inputs: Any, output: Any) -> None:
        logits, labels = output["logits"][:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        expected.append(nn.functional.cross_entropy(logits, labels, reduction="none").detach())

    model.register_forward_hook(loss_by_hand, with_kwargs=True)
    training.start().wait()
    (commit,) = group.commits()
    # The first label is never predicted, and the last two are ignored.
    assert commit.tokens_total == 2 * 2 * 4 * (TIME - 3)
    predicted = torch.stack(expected).reshape(2, -1)
    per_step = predicted.sum(dim=1) / (2 * 4 * (TIME - 3))
    assert commit.loss == pytest.approx(float(per_step.mean()), rel=1e-5)


@matrix("number", [0, 1], fast=1, ids=["relaunched", "late"])
def test_a_late_trainer_continues_at_the_runs_position(
    tiny_group: MakeGroup, make_training: Callable[..., Training], number: int
) -> None:
    group = tiny_group(num_replicas=1, sync_every=2, total_rounds=6, state_every=1)
    first = make_training(group, 0, max_steps=5, lr_scheduler_type="linear")
    first.start().wait()
    assert first.reason == "left"
    assert [commit.round for commit in group.commits()] == [1, 2]
    rates: list[float] = []
    moments: list[float] = []

    def watch(state: Any, given: Any) -> None:
        rates.append(given["lr_scheduler"].get_last_lr()[0])
        moments.append(float(next(iter(given["optimizer"].state.values()))["step"]))

    second = make_training(
        group, number, seed=5, max_steps=40, lr_scheduler_type="linear", on_step=watch
    )
    second.start().wait()
    assert second.reason == "completed"
    assert second.trainer.state.global_step == 8  # rounds 3 to 6
    # The learning rate of step 4 of the run, not of its first own step.
    assert rates[0] == pytest.approx(3e-3 * (1 - 5 / 40))
    assert (moments[0] > 1) == (number == 0)  # the state of the inner optimizer was restored


def test_a_trainer_that_ends_early_leaves_the_group(
    tiny_group: MakeGroup, make_training: Callable[..., Training]
) -> None:
    group = tiny_group(num_replicas=2, sync_every=3, total_rounds=4)
    short, long = make_training(group, 0, max_steps=7), make_training(group, 1)
    run_together(short, long)
    assert (short.reason, long.reason) == ("left", "completed")
    assert [len(commit.contributors) for commit in group.commits()] == [2, 2, 1, 1]


def test_joining_an_ended_run_loads_the_result(
    tiny_group: MakeGroup, make_training: Callable[..., Training]
) -> None:
    group = tiny_group(num_replicas=1, sync_every=2, total_rounds=2)
    first = make_training(group, 0)
    first.start().wait()
    late = make_training(group, 0, seed=9)
    late.start().wait()
    assert late.reason == "completed"
    assert torch.equal(weights(late.trainer.model), weights(first.trainer.model))


def test_group_errors_propagate_from_train(
    tiny_group: MakeGroup, make_training: Callable[..., Training], tmp_path: Path
) -> None:
    group = tiny_group(num_replicas=1)
    (group.root / "group.json").unlink()
    with pytest.raises(ReplicaError, match=r"expected group\.json"):
        make_training(group, 0).start().wait()


def test_losses_outside_the_model_output_are_refused(
    tiny_group: MakeGroup, make_training: Callable[..., Training]
) -> None:
    group = tiny_group(num_replicas=1)
    with pytest.raises(ValueError, match=r"label_smoothing_factor: expected 0, found 0\.1"):
        make_training(group, 0, label_smoothing_factor=0.1).start().wait()
    own = make_training(group, 0)
    own.trainer.compute_loss_func = lambda outputs, labels, **kwargs: outputs["logits"].sum()
    with pytest.raises(ValueError, match="expected a loss in the model's output"):
        own.start().wait()
    own.callback.close()
    assert own.reason == "left"


def test_tokens_and_loss_of_trl_are_those_of_the_log_probabilities() -> None:
    """Under trl.SFTTrainer the model returns these instead of a loss."""
    from diloco.integrations.transformers import _Meter

    class Fused(nn.Linear):
        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            mask = labels.ne(-100)
            return {"log_probs": -2.0 * mask * self.weight.sum() ** 0, "label_mask": mask}

    model = Fused(1, 1)
    meter = _Meter(model)
    labels = torch.tensor([[-100, 1, 2, 3], [-100, -100, 4, -100]])
    model(input_ids=labels, labels=labels)
    model(input_ids=labels, labels=labels[:1])
    tokens, loss = meter.take()
    assert (tokens, float(loss)) == (4 + 3, 2.0)
    with torch.no_grad():
        model(input_ids=labels, labels=labels)  # an evaluation is not part of a step
    with pytest.raises(ValueError, match="expected a step with tokens to predict"):
        meter.take()


def test_schedules_follow_the_step_of_the_run() -> None:
    from diloco.integrations.schedules import follow

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    follow(schedule, 3)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert schedule.get_last_lr() == [0.5]
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.4
