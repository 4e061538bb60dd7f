"""Error feedback: values that top-k omits are kept and count exactly once."""

from __future__ import annotations

import pytest
import torch

from diloco.codecs import get_codec
from diloco.exchange.error_feedback import ErrorFeedback
from diloco.protocol.settings import GroupSettings


def residuals(**changes: object) -> ErrorFeedback:
    chosen = {"codec": "topk", "topk": 2, "error_feedback": 1.0, **changes}
    return ErrorFeedback(GroupSettings(**chosen), fragments=1)  # type: ignore[arg-type]


def gradient(step: int) -> torch.Tensor:
    return torch.randn(50, generator=torch.Generator().manual_seed(step))


def test_sent_and_omitted_values_add_up_to_the_contribution() -> None:
    feedback, codec = residuals(), get_codec("topk", topk=2)
    sent = torch.zeros(50)
    for step in range(20):
        contributed = feedback.added_to(gradient(step), 0)
        sent += codec.decode(codec.encode(contributed), 50)
        feedback.taken(contributed.clone(), 0)
    left = feedback.of[0]
    assert left is not None
    torch.testing.assert_close(sent + left, torch.stack([*map(gradient, range(20))]).sum(0))


def test_a_missed_round_keeps_the_residual() -> None:
    feedback = residuals()
    feedback.taken(gradient(0).clone(), 0)
    before = feedback.of[0]
    assert before is not None
    contributed = feedback.added_to(gradient(1), 0)
    torch.testing.assert_close(contributed, gradient(1) + before)
    assert feedback.of[0] is before


def test_the_residual_decays() -> None:
    feedback = residuals(error_feedback=0.5)
    feedback.restore({0: torch.full((50,), 4.0)})
    assert feedback.added_to(torch.ones(50), 0).tolist() == [3.0] * 50


@pytest.mark.parametrize("changes", [{"codec": "fp32"}, {"codec": "int8"}, {"error_feedback": 0.0}])
def test_other_codecs_have_no_residual(changes: dict[str, object]) -> None:
    feedback = residuals(**changes)
    feedback.taken(gradient(0), 0)
    assert feedback.of == [None]
    whole = gradient(1)
    assert feedback.added_to(whole, 0) is whole
