"""Several inner optimizers of one replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diloco
from diloco.model.inner_state import BY_NAME, Inner, optimizers_of
from diloco.model.named_parameters import check_optimizers
from diloco.training.replica_state import load_replica_state


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


def both(net: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(net.parameters())
    matrices = [p for p in parameters if p.dim() == 2]
    rest = [p for p in parameters if p.dim() < 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]


def train_step(net: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Tensor:
    loss: Tensor = net(torch.ones(2, 3)).square().mean()
    net.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss


def states(optimizers: list[torch.optim.Optimizer]) -> list[Tensor]:
    return [
        value.clone()
        for optimizer in optimizers
        for entry in optimizer.state.values()
        for value in entry.values()
    ]


class Stopped(Exception):
    """The process of a replica ends after its state was saved."""


def test_the_states_of_all_optimizers_are_saved_and_restored_in_a_group(tmp_path: Path) -> None:
    settings = diloco.GroupSettings(
        num_replicas=1,
        sync_every=2,
        total_rounds=4,
        warmup_steps=0,
        eval_every=0,
        state_every=1,
        heartbeat_timeout_s=10.0,
    )
    saved: list[list[Tensor]] = []
    restored: list[list[Tensor]] = []

    def run(rounds: int) -> Any:
        net = model()
        optimizers = both(net)
        with diloco.join(
            str(tmp_path), model=net, inner_optimizer=optimizers, replica=0, settings=settings
        ) as group:
            restored.append(states(optimizers))
            group.register_round_hook(before=lambda round: saved.append(states(optimizers)))
            while not group.done:
                if group.round > rounds:
                    raise Stopped
                group.step(tokens=1, loss=train_step(net, optimizers))
        return group

    with pytest.raises(Stopped):
        run(2)
    kept = load_replica_state(diloco.group.open_store(str(tmp_path)), 0)
    assert kept is not None and set(kept.trees) == {"inner_optimizer.0", "inner_optimizer.1"}
    run(99)
    assert restored[0] == [] and len(restored[1]) == 2 + 3 * 2
    assert all(torch.equal(a, b) for a, b in zip(restored[1], saved[1], strict=True))


def test_one_optimizer_keeps_its_name_in_saved_states() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert list(Inner(optimizers_of(optimizer)).save()) == ["inner_optimizer"]
    assert list(Inner(optimizers_of([optimizer])).save()) == ["inner_optimizer"]


def test_a_state_of_another_number_of_optimizers_is_refused() -> None:
    net = model()
    saved = Inner(both(net)).save()
    one = Inner([torch.optim.SGD(net.parameters(), lr=0.1)])
    with pytest.raises(ValueError, match="state of 1 inner optimizers, found that of 2"):
        one.load(saved)
    one.load({})


def test_other_objects_are_restored_beside_the_optimizers_of_several_ranks() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    other = torch.optim.SGD(net.parameters(), lr=0.1)
    trees = {"other": torch.optim.SGD(net.parameters(), lr=0.7).state_dict(), BY_NAME: {}}
    with pytest.raises(ValueError, match="of one process, found that of several ranks"):
        Inner([optimizer], {"other": other}).load(trees)
    assert other.param_groups[0]["lr"] == 0.7


def test_a_reset_clears_all_optimizers() -> None:
    net = model()
    optimizers = both(net)
    train_step(net, optimizers)
    assert all(optimizer.state for optimizer in optimizers)
    Inner(optimizers).reset()
    assert not any(optimizer.state for optimizer in optimizers)


def test_optimizers_that_do_not_divide_the_parameters_are_refused() -> None:
    net = model()
    muon, adamw = both(net)
    with pytest.raises(ValueError, match="expected an optimizer or several, found none"):
        optimizers_of([])
    every = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"shape \[3, 3\] in the optimizers 0 and 1"):
        optimizers_of([muon, every])
    with pytest.raises(ValueError, match="found none of its 4"):
        check_optimizers(net, [muon, both(model())[1]])
    check_optimizers(net, [muon, adamw])


def test_names_of_optimizers_are_reserved() -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"found \['inner_optimizer\.1'\]"):
        Inner([optimizer], {"inner_optimizer.1": optimizer})
