"""Evaluation of a model of the Transformers library, and of final weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.evaluate import main
from diloco.evaluation.language_model import language_model
from diloco.evaluation.weights import find_weights
from diloco.model import named_parameters
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.workload import HuggingFaceWorkload
from diloco.training.final_result import publish_final
from tests.diloco.evaluation.runs import WRITER, make_run, make_shards, write_checkpoint

WORKLOAD = HuggingFaceWorkload(
    config={
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "tie_word_embeddings": True,
    },
    context=32,
)


def test_final_weights_of_a_llama(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document: Any = WORKLOAD
    store = make_run(tmp_path / "run", workload=document)
    torch.manual_seed(1)
    model = language_model(GroupDocument.read(store), device=torch.device("cpu"))
    publish_final(
        store,
        WRITER,
        round=8,
        reason="completed",
        tensors=dict(named_parameters.state(model.module)),
        weights_digest="",
        config={},
        summary={},
        wall_s=0.0,
    )
    text = bytes(range(97, 123)) * 50
    shards = make_shards(tmp_path / "shards", text)
    assert main([store.uri, "--data", shards, "--tokens", "320", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    row = torch.tensor([list(text[start : start + 33]) for start in range(0, 320, 32)])
    expected = torch.nn.functional.cross_entropy(
        model.logits(row[:, :-1]).flatten(0, 1), row[:, 1:].flatten()
    )
    assert result["round"] == 8
    assert result["metrics"][0]["value"] == pytest.approx(float(expected), rel=1e-5)


def test_a_checkpoint_goes_before_the_final_weights_of_its_round(tmp_path: Path) -> None:
    from tests.diloco.evaluation.runs import parrot

    store = make_run(tmp_path / "run")
    with pytest.raises(ValueError, match="expected a checkpoint or final weights at"):
        find_weights(store)
    manifest = write_checkpoint(store, 8, parrot())
    publish_final(
        store, WRITER, round=8, reason="completed", tensors=dict(parrot().state_dict()),
        weights_digest="", config={}, summary={}, wall_s=0.0,
    )  # fmt: skip
    assert find_weights(store, 8).stored == manifest.weights
    assert find_weights(store).final
