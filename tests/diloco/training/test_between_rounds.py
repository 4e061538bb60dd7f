"""What a caller can do between steps: hooks, a checkpoint on request, an evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diloco
from diloco.errors import ReplicaError
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore
from diloco.training.checkpoint import manifest_rounds
from diloco.training.progress import RoundProgress


def settings(**changes: Any) -> GroupSettings:
    chosen = {
        "num_replicas": 1,
        "sync_every": 3,
        "total_rounds": 4,
        "warmup_steps": 0,
        "eval_every": 0,
        "checkpoint_every": 100,
        **changes,
    }
    return GroupSettings(**chosen)


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(these: list[Tensor], those: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


class Training:
    """A replica alone in its group; ``on_step`` runs before each call of ``group.step``."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.store = LocalStore(folder)
        self.settings = settings(**changes)
        # fp64 weights do not fit into the fp32 vector that is exchanged
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).double())
        self.group: Any = None

    def run(
        self,
        on_step: Callable[[Any], None] = lambda group: None,
        *,
        at_start: Callable[[Any], None] = lambda group: None,
    ) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        with diloco.join(
            self.store.uri,
            model=self.model,
            inner_optimizer=optimizer,
            replica=0,
            settings=self.settings,
        ) as group:
            self.group = group
            at_start(group)
            while not group.done:
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        parameter.sub_(torch.rand_like(parameter) / 3)
                on_step(group)
                group.step(tokens=1, loss=1.0)


# -- hooks ---------------------------------------------------------------------------------------


def test_hooks_run_around_each_round_in_order(tmp_path: Path) -> None:
    calls: list[Any] = []
    training = Training(tmp_path)

    def start(group: Any) -> None:
        group.register_round_hook(
            before=lambda round: calls.append(("before", round, group.data_step)),
            after=lambda done: calls.append(("after", done.round, done.committed, done.outcome)),
        )
        group.register_round_hook(before=lambda round: calls.append("second"))

    training.run(at_start=start)
    assert calls[:3] == [("before", 1, 3), "second", ("after", 1, 1, "included")]
    assert [call[:2] for call in calls if call != "second"] == [
        (when, round) for round in (1, 2, 3, 4) for when in ("before", "after")
    ]


def test_a_hook_sees_local_weights_before_and_global_ones_after(tmp_path: Path) -> None:
    training = Training(tmp_path, outer_lr=1.0, outer_momentum=0.0, total_rounds=1)
    after: list[list[Tensor]] = []

    def before(round: int) -> None:
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.fill_(7.0)

    training.run(
        at_start=lambda group: group.register_round_hook(
            before=before, after=lambda progress: after.append(values(training.model))
        )
    )
    assert all(torch.allclose(v, torch.full_like(v, 7.0)) for v in after[0])


def test_a_removed_hook_is_not_called(tmp_path: Path) -> None:
    seen: list[RoundProgress] = []
    handles: list[Any] = []

    def after(progress: RoundProgress) -> None:
        seen.append(progress)
        handles[0].remove()  # while hooks run

    Training(tmp_path).run(
        at_start=lambda group: handles.append(
            group.register_round_hook(before=lambda round: None, after=after)
        )
    )
    assert [progress.round for progress in seen] == [1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_exception_in_a_hook_ends_this_process_only(tmp_path: Path, when: str) -> None:
    training = Training(tmp_path)
    later: list[int] = []

    def fail(argument: Any) -> None:
        raise KeyError("no such metric")

    def start(group: Any) -> None:
        group.register_round_hook(**{when: fail})
        group.register_round_hook(**{when: later.append})

    with pytest.raises(KeyError, match="no such metric"):
        training.run(at_start=start)
    assert later == []
    with pytest.raises(ReplicaError, match="a round hook has raised an exception"):
        training.group.step(tokens=1, loss=1.0)
    again = Training(tmp_path)
    again.run()  # a new process of the replica ends the run
    assert again.group.reason == "completed"


def test_a_registration_without_a_hook_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="enter before=, after= or both"):
        Training(tmp_path).run(at_start=lambda group: group.register_round_hook())


# -- checkpoint ----------------------------------------------------------------------------------


def test_a_requested_checkpoint_is_written_at_the_next_round_boundary(tmp_path: Path) -> None:
    training = Training(tmp_path)

    def request(group: Any) -> None:
        if group.data_step == 4:  # the second step of round 2
            group.checkpoint()
            assert manifest_rounds(training.store) == [0]

    training.run(request)
    assert manifest_rounds(training.store) == [0, 2, 4]


def test_a_replica_that_cannot_create_objects_keeps_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path)
    can_create = True

    def request(group: Any) -> None:
        nonlocal can_create
        if group.data_step == 1:
            group.checkpoint()
        can_create = group.round != 1

    monkeypatch.setattr(
        "diloco.training.context.ReplicaContext.can_create", lambda self: can_create
    )
    training.run(request)
    assert manifest_rounds(training.store) == [0, 2, 4]


# -- evaluation ----------------------------------------------------------------------------------


def test_an_evaluation_has_the_global_weights_and_restores_the_local_ones(tmp_path: Path) -> None:
    training = Training(tmp_path)
    model, shared, evaluated = training.model, list[list[Tensor]](), list[int]()

    def evaluate(group: Any) -> None:
        local = values(model)
        result = group.evaluate(lambda: (values(model), "result"))
        assert equal(values(model), local) and not equal(result[0], local)
        assert equal(result[0], shared[-1]) and result[1] == "result"
        evaluated.append(group.data_step)

        def fail() -> None:
            with torch.no_grad():
                model[0].weight.fill_(float("nan"))
            raise KeyError("no test set")

        with pytest.raises(KeyError, match="no test set"):
            group.evaluate(fail)
        assert equal(values(model), local)

    def start(group: Any) -> None:
        shared.append(values(model))
        group.register_round_hook(after=lambda progress: shared.append(values(model)))

    training.run(evaluate, at_start=start)
    assert evaluated == list(range(12))
    assert equal(training.group.evaluate(lambda: values(model)), shared[-1])


def test_an_evaluation_does_not_change_the_result(tmp_path: Path) -> None:
    ends = []
    for name in ("with", "without"):
        torch.manual_seed(0)
        training = Training(tmp_path / name, num_fragments=3, overlap_steps=2, total_rounds=6)
        training.run(
            (lambda group: group.evaluate(lambda: None)) if name == "with" else lambda group: None
        )
        ends.append(values(training.model))
    assert equal(*ends)


def test_progress_and_hooks_get_the_same_report(tmp_path: Path) -> None:
    """A round's progress is plain JSON, which the ranks of a replica send to each other."""
    seen: list[RoundProgress] = []
    Training(tmp_path).run(at_start=lambda group: group.register_round_hook(after=seen.append))
    copied = [RoundProgress(**json.loads(json.dumps(vars(progress)))) for progress in seen]
    assert copied == seen and len(seen) == 4
