"""The built-in workloads on token shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.protocol.group_document import GroupDocument
from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.protocol.workload import ByteGPTWorkload, HuggingFaceWorkload
from diloco.store.base import LocalStore
from diloco.workloads import load_workload
from tests.diloco.data.shards import write_shards

SETTINGS = GroupSettings(num_replicas=2, max_replicas=2, batch_size=4)
CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def loaded(workload: Any, *, replica: int = 0, settings: GroupSettings = SETTINGS) -> Any:
    document = GroupDocument(run_id="r", name="n", settings=settings, workload=workload.to_dict())
    return load_workload(document, replica=replica, device="cpu")


@pytest.fixture
def uri(tmp_path: Path) -> str:
    write_shards(LocalStore(tmp_path), shards=3, tokens=2000, vocabulary=256)
    return tmp_path.as_uri()


@pytest.mark.parametrize("kind", ["byte_gpt", "huggingface"])
def test_replicas_train_on_different_samples(uri: str, kind: str) -> None:
    described = (
        ByteGPTWorkload(data=uri, data_format="shards", eval_bytes=256)
        if kind == "byte_gpt"
        else HuggingFaceWorkload(
            config=CONFIG, data=uri, data_format="shards", context=128, eval_tokens=256
        )
    )
    both = [loaded(described, replica=replica) for replica in range(2)]
    batches = [training.train_batch(3) for training in both]
    tokens = [batch if kind == "byte_gpt" else batch.tokens for batch in batches]
    assert [part.shape for part in tokens] == [(4, 129), (4, 129)]
    assert not torch.equal(*tokens)
    again = loaded(described).train_batch(3)
    assert torch.equal(again if kind == "byte_gpt" else again.tokens, tokens[0])
    model = both[0].build_model()
    both[0].loss(model, batches[0]).backward()
    assert both[0].evaluate(model).tokens == 256


def test_work_units_are_refused_with_fragments(uri: str) -> None:
    workload = ByteGPTWorkload(data=uri, data_format="shards", data_coverage="units")
    loaded(workload)
    fragments = GroupSettings(num_replicas=2, max_replicas=2, sync_every=20, num_fragments=2)
    with pytest.raises(SettingsError, match="expected 1 with work units"):
        loaded(workload, settings=fragments)


def test_shards_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    write_shards(LocalStore(tmp_path), tokens=2000, vocabulary=299)
    with pytest.raises(SettingsError, match="expected tokens for a model of 256, found 299"):
        loaded(ByteGPTWorkload(data=tmp_path.as_uri(), data_format="shards"))


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"data_format": "parquet"}, "data_format"),
        ({"data_format": "shards"}, "data"),
        ({"data": "s3://b/t", "data_format": "shards", "data_coverage": "all"}, "data_coverage"),
        ({"data": "s3://b/t", "data_coverage": "units"}, "data_coverage"),
    ],
)
def test_a_document_that_makes_no_sense_is_refused(values: dict[str, str], field: str) -> None:
    with pytest.raises(SettingsError) as caught:
        ByteGPTWorkload(**values)
    assert caught.value.field == field
