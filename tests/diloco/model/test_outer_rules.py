"""Outer rules of other packages."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.model import outer_rules
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.model.outer_rules import Nesterov
from diloco.protocol.blocks import Span
from diloco.protocol.settings import GroupSettings, SettingsError
from tests import torch_process

ROOT = Path(__file__).parents[3]

PACKAGE = """
class Lion:
    vectors = ("momentum", "steps")

    def __init__(self, beta):
        self.beta = beta

    def update(self, gradient, vectors, *, lr):
        momentum = vectors["momentum"]
        momentum.mul_(self.beta)
        momentum.add_(gradient)
        vectors["steps"].add_(1.0)
        return momentum.sign().mul_(lr)


def lion(settings):
    return Lion(settings.outer_momentum)


class Normalised(Lion):
    def update(self, gradient, vectors, *, lr):
        return gradient / gradient.norm()


def normalised(settings):
    return Normalised(0.0)
"""

PROGRAM = """
import sys, torch, diloco
from diloco.errors import ReplicaError
from diloco.protocol.settings import SettingsError

def train(uri, replica, rounds, rule="lion"):
    settings = diloco.GroupSettings(
        num_replicas=1, sync_every=2, total_rounds=6, warmup_steps=0, eval_every=0, outer_lr=0.5,
        checkpoint_every=2, outer_rule=rule,
    )
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with diloco.join(
        uri, model=model, inner_optimizer=optimizer, replica=replica, settings=settings
    ) as group:
        while not group.done and group.round <= rounds:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.25)
            group.step(tokens=1, loss=1.0)
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()

assert "lion" in diloco.GroupSettings.__dataclass_fields__["outer_rule"].metadata["choices"]
train(sys.argv[1], 0, rounds=3)
print(train(sys.argv[1], 1, rounds=99))  # another replica, which replays round 3
try:
    train(sys.argv[2], 0, rounds=1, rule="normalised")
except SettingsError as error:
    print(error)
"""


def test_a_rule_of_another_package_trains_and_is_restored_from_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "lion_rule.py").write_text(PACKAGE)
    info = tmp_path / "lion_rule-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lion-rule\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[diloco.outer_rules]\nlion = lion_rule:lion\nnormalised = lion_rule:normalised\n"
    )
    result = torch_process.run(
        ["-c", PROGRAM, tmp_path / "run", tmp_path / "other"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    weights, refusal = result.stdout.splitlines()
    assert weights == str([1.0 + 6 * 0.5] * 4)
    assert "outer_rule: expected rule 'normalised' to give the same bits" in refusal


def test_a_rule_that_is_not_installed_is_refused() -> None:
    with pytest.raises(SettingsError, match="outer_rule: expected one of nesterov"):
        GroupSettings(outer_rule="lion")


class Broken:
    vectors: Any = ("m",)

    def __init__(self, fault: str) -> None:
        self.fault = fault
        if fault == "reserved name":
            self.vectors = ("committed_total",)

    def update(self, gradient: Tensor, vectors: Mapping[str, Tensor], *, lr: float) -> Tensor:
        if self.fault == "sorts":
            return gradient.sort().values
        if self.fault == "changes the gradient":
            return gradient.mul_(2.0).clone()
        if self.fault == "fp64":
            return gradient.double()
        if self.fault == "state by position":
            vectors["m"].copy_(torch.arange(float(vectors["m"].numel())))
        return gradient.mul(lr)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("sorts", "the same bits for a vector and for its pieces"),
        ("state by position", "the same bits for a vector and for its pieces"),
        ("changes the gradient", "leaves the gradient unchanged"),
        ("fp64", r"an update \(4099,\) of float32, found \(4099,\) torch\.float64"),
        ("reserved name", "state vectors with different names"),
    ],
)
def test_a_rule_that_breaks_the_contract_is_refused(
    fault: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Entry:
        value = "package:rule"

        def load(self) -> Any:
            return lambda settings: Broken(fault)

    monkeypatch.setattr(metadata, "entry_points", lambda **which: [Entry()])
    settings = GroupSettings()
    object.__setattr__(settings, "outer_rule", "broken")
    with pytest.raises(SettingsError, match=message):
        outer_rules.load_rule(settings)


def test_the_built_in_rule_keeps_its_own_contract() -> None:
    outer_rules._check("nesterov", Nesterov(0.9))


def test_averaged_elements_become_the_average() -> None:
    torch.manual_seed(0)
    weights = base = torch.randn(1_100_000)
    spans = [Span(5, 9), Span(1_048_570, 1_048_590), Span(1_099_999, 1_100_000)]
    outer = OuterOptimizer(lr=0.7, momentum=0.9, numel=weights.numel(), averaged=spans)
    plain = OuterOptimizer(lr=0.7, momentum=0.9, numel=weights.numel())
    other = weights.clone()
    for _ in range(2):
        gradient = torch.randn(weights.numel())
        base = weights.clone()
        outer.step(weights, gradient)
        plain.step(other, gradient)
    inside = torch.zeros(weights.numel(), dtype=torch.bool)
    for span in spans:
        inside[span.start : span.stop] = True
    assert torch.equal(weights[inside], (base - gradient)[inside])
    assert torch.equal(weights[~inside], other[~inside])


def test_averaged_elements_become_the_average_of_the_contributors_while_a_replica_is_late() -> None:
    """Two of three contribute 4 and 2, each with a third: the average is 3, not 2/3 of the way."""
    weights = torch.full((2,), 10.0)
    outer = OuterOptimizer(lr=1.0, momentum=0.0, numel=2, averaged=[Span(1, 2)])
    gradient = torch.full((2,), (6.0 + 8.0) / 3)
    outer.step(weights, gradient, present=2 / 3)
    torch.testing.assert_close(weights, torch.tensor([10 - 14 / 3, 3.0]))
