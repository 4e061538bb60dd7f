"""One process of the tests of replicas with several ranks; see ``test_ranks.py``.

    python ranks_program.py ROOT PLACE [SCENARIO ...]

Places 0 and 1 are the two ranks of replica 0, place 2 is replica 1, alone. All scenarios are run in
one process per place, because starting torch is slow. The result of each scenario is
written to ``ROOT/<scenario>.<place>.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import diloco
from diloco.errors import ReplicaError
from diloco.exchange import inflight_rounds
from diloco.model.flat_parameters import Layout
from diloco.model.named_parameters import is_sharded, local, state
from diloco.model.outer_optimizer import digest
from diloco.ranks import collective_ops
from diloco.ranks.command_channel import CommandChannel, StepMessage

LOSSES = (1.0, 4.0)
TOKENS = (8, 16)
ALONE = 8
"""Tokens of a step of replica 1."""


class Tiny(nn.Module):
    """Odd sizes that two ranks cannot split evenly, a tied and a frozen parameter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.body(self.embed(x))) * self.scale
        return self.head(hidden) * self.frozen.sum()  # type: ignore[no-any-return]


class Counter:
    """The caller's own state that is saved with the inner optimizer."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def tiny(place: int) -> nn.Module:
    torch.manual_seed(10 + place)  # every process starts from other weights
    return Tiny()


def ddp(place: int) -> nn.Module:
    model = tiny(place)
    return model if place == 2 else DistributedDataParallel(torch.compile(model, backend="eager"))


def fsdp(place: int) -> nn.Module:
    model = tiny(place)
    if place == 2:
        return model
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.body, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class LeftAlone(Exception):
    """Breaks out of the training loop."""


class Scenario:
    """Trains in one group as one place; observations are stored in ``observed``."""

    def __init__(self, root: Path, name: str, place: int) -> None:
        self.root, self.name, self.place = root, name, place
        self.observed: dict[str, Any] = {"evaluated": 0, "steps": 0, "messages": []}

    def run(
        self,
        make: Callable[[int], nn.Module],
        *,
        group: str = "",
        on_step: Callable[[Any, nn.Module], None] = lambda group, model: None,
    ) -> None:
        model = make(self.place)
        optimizers = self._optimizers([p for p in model.parameters() if p.requires_grad])
        counter = Counter()

        def evaluate() -> tuple[float, int]:
            self.observed["evaluated"] += 1
            with torch.no_grad():
                model(torch.zeros(1, dtype=torch.long))
            if self.name == "leader-raises-in-step" and self.place == 0:
                raise KeyError("no test set")
            return 1.25, 10

        with diloco.join(
            str(self.root / "runs" / (group or self.name)),
            replica=self.place // 2,
            model=model,
            inner_optimizer=optimizers,
            evaluate=evaluate,
            heartbeat_interval_s=0.2,
            telemetry_interval_s=0.2,
            stateful={"counter": counter},
            buffers="average" if self.name == "between" else None,
        ) as joined:
            self.observed["joined"] = [joined.round, joined.schedule_step, joined.data_step]
            self.observed["restored"] = {"count": counter.count, "moments": moments(optimizers)}
            try:
                self._train(joined, model, optimizers, counter, on_step)
            except LeftAlone:
                return
        self.observed["reason"] = joined.reason
        self.observed["adam_steps"] = max(
            int(entry["step"]) for optimizer in optimizers for entry in optimizer.state.values()
        )
        full = {name: tensor.detach().float().flatten() for name, tensor in state(model)}
        self.observed["names"] = sorted(full)
        self.observed["weights"] = digest(torch.cat([full[name] for name in sorted(full)]))

    def _optimizers(self, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        if self.name not in ("first-half", "second-half"):
            return [torch.optim.AdamW(parameters, lr=0.02)]
        return [
            torch.optim.AdamW(parameters[:1], lr=0.02),
            torch.optim.RAdam(parameters[1:], lr=0.02),
        ]

    def _train(
        self, joined: Any, model: nn.Module, optimizers: Any, counter: Counter, on_step: Any
    ) -> None:
        while not joined.done:
            self.observed["position"] = [joined.round, joined.schedule_step, joined.data_step]
            data = torch.Generator().manual_seed(joined.data_step * 10 + self.place)
            x = torch.randint(5, (4,), generator=data)
            loss = nn.functional.cross_entropy(model(x), (x + 1) % 5)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            for optimizer in optimizers:
                optimizer.step()
            self.observed["steps"] += 1
            counter.count += 1
            on_step(joined, model)
            # Losses of two ranks that are easy to distinguish.
            shown = loss if self.place == 2 else LOSSES[self.place]
            tokens = ALONE if self.place == 2 else TOKENS[self.place]
            before = len(sent)
            joined.step(tokens=tokens, loss=shown, grad_norm=norm)
            self.observed["messages"].append(len(sent) - before)
            if self.observed["steps"] == 8:
                self.observed["kept"] = {"count": counter.count, "moments": moments(optimizers)}

    def layout(self) -> None:
        """A sharded model as a vector, without any group."""
        model = fsdp(self.place)
        layout = Layout(model)
        assert any(is_sharded(parameter) for parameter in model.parameters())
        vector = torch.arange(float(layout.numel))
        layout.write(vector)
        self.observed["read"] = layout.read().tolist()
        with torch.no_grad():
            model(torch.zeros(1, dtype=torch.long))  # leaves full parameters
        layout.write(vector + 1)
        self.observed["read_after_forward"] = layout.read().tolist()
        self.observed["computed"] = model(torch.tensor([4])).detach().flatten().tolist()
        self.observed["hash"] = layout.model_hash
        reference = tiny(self.place)
        bare = Layout(reference)
        bare.write(vector + 1)
        self.observed["expected"] = reference(torch.tensor([4])).detach().flatten().tolist()
        self.observed["bare_hash"] = bare.model_hash


def moments(optimizers: list[torch.optim.Optimizer]) -> float:
    """Return the sum of this rank's part of the first moments."""
    total = 0.0
    for entry in (entry for optimizer in optimizers for entry in optimizer.state.values()):
        moment = entry["exp_avg"]
        total += float((moment.to_local() if is_sharded(moment) else moment).abs().sum())
    return total


def parts(model: nn.Module) -> str:
    """Return the digest of the parts of the parameters that this rank holds."""
    held = [local(parameter).float().flatten() for parameter in model.parameters()]
    return digest(torch.cat(held))


def weights(model: nn.Module) -> str:
    """Return the digest of the full weights; all ranks call it together."""
    return digest(torch.cat([tensor.float().flatten() for _, tensor in state(model)]))


def mean(place: int) -> float:
    """Return the mean of the places of both ranks."""
    total = torch.tensor([float(place)])
    dist.all_reduce(total)
    return float(total) / 2


sent: list[StepMessage] = []
"""Every message of this process."""


def listen() -> None:
    all_reduce = CommandChannel.all_reduce

    def recording(self: CommandChannel, message: StepMessage, **options: Any) -> StepMessage:
        sent.append(message)
        return all_reduce(self, message, **options)

    CommandChannel.all_reduce = recording  # type: ignore[method-assign]


def crash() -> None:
    raise KeyError("out of luck")


def leave_alone() -> None:
    raise LeftAlone


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wider(place: int) -> nn.Module:
    return nn.Linear(2, 2 + place)


def play(scenario: Scenario) -> None:
    place = scenario.place

    def at(chosen: int, step: int, action: Callable[[], None]) -> Callable[[Any, nn.Module], None]:
        def on_step(group: Any, model: nn.Module) -> None:
            if place == chosen and group.data_step == step:
                action()

        return on_step

    def poison(group: Any, model: Any) -> None:
        if scenario.observed["steps"] == 2:
            with torch.no_grad():
                model.body.bias.fill_(float("nan"))

    def between(group: Any, model: nn.Module) -> None:
        """Hooks that communicate, an evaluation in each round, a buffer that differs by rank."""
        observed = scenario.observed
        with torch.no_grad():
            model.scale.add_(0.1 + place)  # type: ignore[operator]
        if observed["steps"] == 1:
            observed["hooks"], observed["swapped"] = [], []
            group.register_round_hook(
                before=lambda round: observed["hooks"].append([round, mean(place)]),
                after=lambda progress: observed["hooks"].append(
                    [progress.outcome, mean(place), weights(model)]
                ),
            )
        if group.data_step % 4 == 1:
            local = [parts(model), weights(model)]
            inside = group.evaluate(lambda: weights(model))
            restored = [parts(model), weights(model)] == local
            observed["swapped"].append([inside, inside != local[1], restored])
        group.checkpoint()

    def leave(group: Any, model: nn.Module) -> None:
        if place == 1 and group.round == 3:
            group.leave()

    def leave_in_time(group: Any, model: nn.Module) -> None:
        if place == 1 and group.data_step == 5:
            group.leave(within_s=600.0)
        if place == 0 and group.data_step == 6:
            group._shutdown.share = 0.0  # the time for further steps is over

    def leave_while_the_leader_waits(group: Any, model: nn.Module) -> None:
        """As by a signal that only this rank gets, while the leader waits for replica 1."""
        if group.data_step == 3:
            collective_ops.KEEP_LISTENING_S = 0.05
            inflight_rounds.CHECK_EVERY_S = inflight_rounds.MEANWHILE_EVERY_S = 0.05
            if place == 1:
                threading.Timer(0.5, group.leave, kwargs={"within_s": 2.0}).start()

    collective_ops.KEEP_LISTENING_S = 600.0  # so that the number of messages does not vary
    match scenario.name:
        case "leader-waits":
            waits = (inflight_rounds.CHECK_EVERY_S, inflight_rounds.MEANWHILE_EVERY_S)
            scenario.run(ddp, on_step=leave_while_the_leader_waits)
            inflight_rounds.CHECK_EVERY_S, inflight_rounds.MEANWHILE_EVERY_S = waits
        case "handed-in":
            scenario.run(fsdp, on_step=leave_in_time)
        case "ddp":
            scenario.run(ddp)
        case "fsdp":
            scenario.run(fsdp)
        case "overlap":
            # As on a GPU: losses are averaged where they are, by the ranks' own process group.
            on_gpu, collective_ops.on_gpu = collective_ops.on_gpu, lambda tensor: True
            scenario.run(fsdp)
            collective_ops.on_gpu = on_gpu
        case "layout":
            scenario.layout()
        case "non-finite":
            scenario.run(fsdp, on_step=poison)
        case "between":
            scenario.run(fsdp, on_step=between)
        case "first-half":
            scenario.run(fsdp, group="resumed", on_step=leave)
        case "second-half":
            scenario.run(fsdp, group="resumed")
        case "follower-raises":
            scenario.run(ddp, on_step=at(1, 2, crash))
        case "leader-raises":
            scenario.run(ddp, on_step=at(0, 2, crash))
        case "leader-raises-in-step":
            scenario.run(ddp)
        case "follower-parts":
            scenario.run(ddp, on_step=at(1, 2, leave_alone))
        case "no-group":
            scenario.run(ddp, group="nothing-here")
        case "other-model":
            scenario.run(wider)
        case "killed":
            scenario.run(ddp, on_step=at(0, 2, die))


ALONE_TOO = ("ddp", "fsdp", "overlap")
"""Scenarios with replica 1."""
SCENARIOS = (
    *ALONE_TOO,
    "layout",
    "non-finite",
    "between",
    "first-half",
    "second-half",
    "handed-in",
    "leader-waits",
    "follower-raises",
    "leader-raises",
    "leader-raises-in-step",
    "follower-parts",
    "no-group",
    "other-model",
    "killed",
)


def main() -> None:
    root, place = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    listen()
    for name in sys.argv[3:] or SCENARIOS:
        if place == 2 and name not in ALONE_TOO:
            continue
        scenario = Scenario(root, name, place)
        if place < 2:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{root / name}.meet",
                rank=place,
                world_size=2,
                timeout=timedelta(minutes=10),
            )
        try:
            play(scenario)
        except Exception as error:
            scenario.observed["error"] = f"{type(error).__name__}: {error}"
            scenario.observed["replica_error"] = isinstance(error, ReplicaError)
        (root / f"{name}.{place}.json").write_text(json.dumps(scenario.observed))
        if place < 2:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
