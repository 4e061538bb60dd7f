"""The result of an arm depends on its settings and on the seed only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.experiments import training
from bench.experiments.arms import BATCH, CONTEXT, PLAIN, Arm, dropped
from bench.experiments.training import train


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    text = tmp_path / "text"
    text.write_text("".join(f"line {n} of a text\n" for n in range(5000)))
    monkeypatch.setattr(training, "TEXT", str(text))
    monkeypatch.setattr(training, "EVAL_BYTES", 4096)
    training._corpus.cache_clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_training_with_dropped_contributions_is_reproducible() -> None:
    arm = Arm(name="tiny", title="", members=(2,) * 4, steps_per_round=2, drop=0.5)
    first, second = train(arm, seed=3), train(arm, seed=3)
    assert first == second
    lost = sum(len(dropped(arm, round=r, seed=3)) for r in range(1, 5))
    assert (first.contributions, first.lost) == (8, lost)
    assert lost > 0, "choose a seed that drops a contribution"
    complete = train(Arm(name="all", title="", members=(2,) * 4, steps_per_round=2), seed=3)
    assert complete.loss != first.loss


def test_replicas_join_and_leave_at_their_rounds() -> None:
    arm = Arm(name="tiny", title="", members=(1, 2, 3, 1), steps_per_round=2)
    outcome = train(arm, seed=0)
    assert [tokens for tokens, _ in outcome.curve] == [
        n * 2 * BATCH * CONTEXT for n in (1, 3, 6, 7)
    ]


def test_one_replica_without_momentum_is_plain_training() -> None:
    """With outer learning rate 1 and momentum 0 the global weights are those of the replica."""
    plain = Arm(name="plain", title="", kind=PLAIN, members=(1,) * 4, steps_per_round=2)
    settings = {"outer_lr": 1.0, "outer_momentum": 0.0}
    group = Arm(name="group", title="", members=(1,) * 4, steps_per_round=2, settings=settings)
    torch.testing.assert_close(
        train(group, seed=0).loss, train(plain, seed=0).loss, rtol=1e-5, atol=0
    )
