"""The card of exported weights: its content, and that it replaces only generated cards."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from diloco.model_card import GENERATED, NAME, Card, card_of_export, write_card
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.settings import GroupSettings


def card_of(name: str = "islands", **summary: Any) -> Card:
    document = GroupDocument.new(GroupSettings(num_replicas=3, sync_every=50), name=name)
    return card_of_export(
        document,
        source="final weights, round 7",
        round=7,
        library="transformers",
        summary={"eval_round": 7, "tokens": 12_345_678, **summary},
    )


def test_the_card_has_the_origin_and_the_loss(tmp_path: Path) -> None:
    write_card(tmp_path, card_of(eval_loss=1.5))
    card = ModelCard.load(tmp_path / NAME)
    assert (card.data.library_name, card.data.tags) == ("transformers", ["diloco"])
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("loss", 1.5)
    for row in ("| Run | islands |", "| Tokens | 12,345,678 |", "| Replicas | 3 |"):
        assert row in card.text


@pytest.mark.parametrize(
    "summary",
    [
        {},
        {"eval_loss": math.nan},
        {"eval_loss": "1.5"},
        {"eval_loss": 1.5, "eval_round": 6},
        {"eval_loss": [1.5], "tokens": "many"},
    ],
)
def test_a_loss_that_is_not_of_these_weights_is_left_out(
    tmp_path: Path, summary: dict[str, Any]
) -> None:
    write_card(tmp_path, card_of(**summary))
    card = ModelCard.load(tmp_path / NAME)
    assert card.data.eval_results is None
    assert "Evaluation of these weights" not in card.text


def test_the_name_of_a_run_cannot_add_to_the_card(tmp_path: Path) -> None:
    write_card(tmp_path, card_of("a | b\n---\n<script>", eval_loss=1.5))
    text = (tmp_path / NAME).read_text()
    assert "<script>" not in text
    assert text.count("\n---\n") == 1
    assert ModelCard.load(tmp_path / NAME).data.library_name == "transformers"


def test_a_card_of_the_user_is_kept(tmp_path: Path) -> None:
    write_card(tmp_path, card_of(eval_loss=1.5))
    write_card(tmp_path, card_of(eval_loss=1.25))
    path = tmp_path / NAME
    assert "| loss | 1.25 |" in path.read_text()
    own = path.read_text().replace(GENERATED, "")
    path.write_text(own)
    write_card(tmp_path, card_of(eval_loss=1.0))
    assert path.read_text() == own


def test_a_name_that_cannot_be_encoded_leaves_the_export_whole(tmp_path: Path) -> None:
    write_card(tmp_path, card_of("île \ud800", eval_loss=1.5))
    assert "île ?" in (tmp_path / NAME).read_text("utf-8")
