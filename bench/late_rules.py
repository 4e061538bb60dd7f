"""Rules for late work, tried on an arm of ``bench/quality.py`` in a loop without the library.

The loop has the same model, text, losses and outer optimizer as the arm, and ends with the loss of
the library's replicas to four digits (``along=0 rest=1 share=0.5 room=0.5`` is their rule, but for
replicas that are away). So a rule can be compared before it is built. With d the progress of a
replica that missed its m-th round in a row, g the mean pseudo-gradient of this round, and e the
component of d along ``-g``::

    weights    1 / D, D = contributors + scale * sum of room^(m - 1) over the late replicas
    kept       along * e + f * rest * (d - e),  f = 1 if m = 1, else share

``toward=step`` takes the component along the step of the outer optimizer, with its momentum.

    python bench/late_rules.py                                 the table of the published results
    python bench/late_rules.py ARM --seeds 0 1 --rule along=0 rest=1 share=0.5 --out FILE
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from bench.experiments.arms import GROUP, Arm, all_arms, dropped
from bench.experiments.training import one_step, workload_of
from diloco.model.flat_parameters import Layout
from diloco.model.inner_state import optimizers_of
from diloco.protocol.settings import GroupSettings

PUBLISHED = Path(__file__).resolve().parent / "results" / "late_rules.jsonl"


@dataclass(frozen=True)
class Rule:
    """The parameters of a rule, by the formulas above."""

    along: float = 0.5
    rest: float = 0.5
    share: float = 1.0
    room: float = 0.5
    scale: float = 1.0
    toward: str = "mean"

    @classmethod
    def parse(cls, given: list[str]) -> Rule:
        """Parse ``name=value``. Raises :class:`ValueError` for another name or value."""
        values = dict(pair.split("=", 1) for pair in given)
        if unknown := values.keys() - {field.name for field in fields(cls)}:
            raise ValueError(f"expected parameters of the rule, found {', '.join(sorted(unknown))}")
        toward = values.pop("toward", "mean")
        if toward not in ("mean", "step"):
            raise ValueError(f"toward: expected mean or step, found {toward}")
        return cls(**{name: float(value) for name, value in values.items()}, toward=toward)

    def __str__(self) -> str:
        given = asdict(self)
        changed = {f.name: given[f.name] for f in fields(self) if given[f.name] != f.default}
        return " ".join(f"{name}={value}" for name, value in changed.items()) or "all defaults"

    def kept(self, progress: Tensor, mean: Tensor, step: Tensor, *, missed: int) -> Tensor:
        """Return what is kept of ``progress`` (n,) after the ``missed``-th round in a row."""
        along = -mean if self.toward == "mean" else step
        component = along * (float(progress @ along) / float(along @ along))
        factor = self.rest if missed == 1 else self.rest * self.share
        return self.along * component + factor * (progress - component)


def train(arm: Arm, seed: int, rule: Rule) -> float:
    """Return the held-out loss of the global weights."""
    settings = GroupSettings(**arm.group_settings(seed))
    replicas = range(settings.max_replicas)
    workloads = [workload_of(settings, replica) for replica in replicas]
    models = [workload.build_model() for workload in workloads]
    optimizers = [
        optimizers_of(workload.inner_optimizer(model))
        for workload, model in zip(workloads, models, strict=True)
    ]
    layouts = [Layout(model) for model in models]
    weights = layouts[0].read()
    for layout in layouts:
        layout.write(weights)
    momentum = torch.zeros_like(weights)
    missed = [0 for _ in replicas]
    for round in range(1, len(arm.members) + 1):
        for replica in replicas:
            for step in range((round - 1) * settings.sync_every, round * settings.sync_every):
                one_step(
                    workloads[replica],
                    models[replica],
                    optimizers[replica],
                    data_step=step,
                    schedule_step=step,
                    clip=settings.grad_clip,
                )
        lost = dropped(arm, round=round, seed=seed) if arm.loses else frozenset()
        missed = [missed[replica] + 1 if replica in lost else 0 for replica in replicas]
        progress = [layout.read() - weights for layout in layouts]
        present = [replica for replica in replicas if replica not in lost]
        room = sum(rule.room ** (missed[replica] - 1) for replica in lost)
        total = len(present) + rule.scale * room
        mean = sum((-progress[replica] / total for replica in present), torch.zeros_like(weights))
        momentum = settings.outer_momentum * momentum + mean
        change = -settings.outer_lr * (mean + settings.outer_momentum * momentum)
        weights = weights + change
        for replica in replicas:
            kept = torch.zeros_like(weights)
            if replica in lost:
                kept = rule.kept(progress[replica], mean, change, missed=missed[replica])
            layouts[replica].write(weights + kept)
    layouts[0].write(weights)
    return workloads[0].evaluate(models[0]).loss


def table(path: Path) -> str:
    """Return the results of each arm and rule against no loss with the same seed."""
    results = [json.loads(line) for line in path.read_text().splitlines()]
    calm = {r["seed"]: r["loss"] for r in results if r["arm"] == "diloco"}
    found: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for result in results:
        if result["arm"] != "diloco":
            change = 100 * math.expm1(result["loss"] - calm[result["seed"]])
            found[result["arm"], str(Rule(**result["rule"]))][result["seed"]] = change
    lines = ["| arm | rule | perplexity, % | seeds |", "| --- | --- | --- | --- |"]
    for (arm, rule), changes in found.items():
        values = [changes[seed] for seed in sorted(changes)]
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        each = ", ".join(f"{seed}: {changes[seed]:+.1f}" for seed in sorted(changes))
        lines.append(f"| {arm} | {rule} | {statistics.fmean(values):+.2f} ± {error:.2f} | {each} |")
    return "\n".join(lines)


def main() -> int:
    arms = {arm.name: arm for arm in all_arms() if arm.kind == GROUP and not arm.retired}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arm", nargs="?", choices=arms, metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--rule", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, default=PUBLISHED, help="append the results to FILE")
    given = parser.parse_args()
    if given.arm is None:
        print(table(given.out))
        return 0
    try:
        rule = Rule.parse(given.rule)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    for seed in given.seeds:
        loss = train(arms[given.arm], seed, rule)
        result = {"arm": given.arm, "seed": seed, "rule": asdict(rule), "loss": loss}
        with given.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{given.arm} seed {seed}, {rule}: {loss:.4f} nats per byte", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
