"""The Transformers workload, with data in every format, without a network."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from huggingface_hub import ModelCard
from torch import Tensor, nn

from diloco import replica
from diloco.evaluation.weights import load_into
from diloco.init import create_group
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.records import FinalSample
from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.protocol.workload import HuggingFaceWorkload
from diloco.training.sample import SAMPLE_BYTES, SEED, TEMPERATURE
from diloco.workloads import load_workload
from diloco.workloads.tokens import byte_tokenizer
from tests import torch_process
from tests.model_hub import running_model_hub

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}


def sentences(n: int = 400) -> list[str]:
    """Documents that are all different."""
    return [f"Island {i} has {i * i % 97} palms and a ferry to island {i + 1}. " for i in range(n)]


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "islands.txt"
    path.write_text("".join(sentences()))
    return path


def described(data: Path | str, **fields: Any) -> HuggingFaceWorkload:
    chosen = {"config": LLAMA, "context": 16, "eval_tokens": 200, "data": str(data), **fields}
    return HuggingFaceWorkload(**chosen)


def loaded(workload: HuggingFaceWorkload, *, number: int = 0, **settings: Any) -> Any:
    document = GroupDocument(
        run_id="r",
        name="n",
        settings=GroupSettings(**{"num_replicas": 2, "batch_size": 4, **settings}),
        workload=workload.to_dict(),
    )
    return load_workload(document, replica=number, device="cpu")


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_batches_and_weights_depend_on_seed_replica_and_step_alone(text_file: Path) -> None:
    one, same, other = (loaded(described(text_file), number=number) for number in (0, 0, 1))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert torch.equal(one.train_batch(5).tokens, same.train_batch(5).tokens)
    assert not torch.equal(one.train_batch(5).tokens, one.train_batch(6).tokens)
    assert not torch.equal(one.train_batch(5).tokens, other.train_batch(5).tokens)
    first, second = one.build_model(), other.build_model()
    assert torch.equal(weights(first), weights(second))
    assert one.tokens(one.train_batch(0)) == 4 * 16
    assert one.evaluate(first) == other.evaluate(second)
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_is_a_function_of_the_step(text_file: Path) -> None:
    workload = described(text_file, config={**GPT2, "resid_pdrop": 0.5})
    training = loaded(workload)
    model = training.build_model()
    batch = training.train_batch(0)
    losses = [training.loss(model, batch._replace(step=step)).item() for step in (3, 3, 4)]
    assert losses[0] == losses[1] != losses[2]
    held_out = [training.evaluate(model).loss for _ in range(2)]
    assert held_out[0] == held_out[1]
    assert model.training


def test_shards_and_held_out_text_have_no_piece_in_common(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences()))
    result = []
    for number in range(3):
        training = loaded(described(rows), number=number, num_replicas=3, max_replicas=3)
        result.append(set(bytes(training._train.tokens.astype(np.uint8)).decode().split(". ")))
        held_out = bytes(training._held_out.numpy().astype(np.uint8)).decode().split(". ")
        result.append(set(held_out[1:-1]))
    shards, kept_back = result[::2], result[1]
    assert result[1] == result[3] == result[5]
    assert sum(len(shard - {""}) for shard in shards) > 300
    for index, shard in enumerate(shards):
        assert all(not (shard - {""}) & other for other in shards[index + 1 :])
        assert not shard & kept_back


def write(folder: Path, form: str) -> str:
    texts = sentences()
    if form == "parquet":
        pq.write_table(pa.table({"text": texts}), folder / "rows.parquet")
        return str(folder / "rows.parquet")
    if form == "jsonl":
        for part in range(2):
            lines = [json.dumps({"text": text, "n": 1}) for text in texts[part::2]]
            (folder / f"rows-{part}.jsonl").write_text("\n".join(lines) + "\n")
        return str(folder / "*.jsonl")
    if form == "folder":
        for index, text in enumerate(texts):
            (folder / f"{index:03}.md").write_text(text)
        return str(folder)
    return "stdlib"


@pytest.mark.parametrize("form", ["parquet", "jsonl", "folder", "stdlib"])
def test_data_formats(tmp_path: Path, form: str) -> None:
    data = write(tmp_path, form)
    training = loaded(described(data, documents=300))
    assert len(training._train.tokens) > 800
    assert training._held_out.shape == (200 // 16, 17)


def test_a_data_set_can_be_a_directory(tmp_path: Path) -> None:
    write(tmp_path, "parquet")
    training = loaded(described(tmp_path, data_format="dataset"))
    assert len(training._train.tokens) > 800


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": "/nowhere/x.txt"}, "data: expected readable text"),
        ({"text_column": "words"}, "text_column: expected text in 'words', found text"),
        ({"context": 63, "documents": 3}, "data: expected at least 64 tokens"),
        ({"context": 65}, "context: expected at most the model's 64, found 65"),
        ({"config": {**LLAMA, "vocab_size": 200}}, "tokenizer: expected at most the model's 200"),
        ({"config": {"model_type": "lama"}}, "config: expected a model's configuration"),
        ({"tokenizer": "/nowhere"}, "tokenizer: expected a directory or a name on the Hub"),
    ],
)
def test_invalid_workloads_are_settings_errors(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences()))
    with pytest.raises(SettingsError) as error:
        loaded(described(fields.pop("data", rows), **fields))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": "", "config": {}}, "model"),
        ({"model": "gpt2", "config": LLAMA}, "model"),
        ({"config": {"hidden_size": 3}}, "config"),
        ({"config": []}, "config"),
        ({"config": LLAMA, "context": 0}, "context"),
        ({"config": LLAMA, "context": True}, "context"),
        ({"config": LLAMA, "data_format": "xml"}, "data_format"),
        ({"config": LLAMA, "documents": -1}, "documents"),
        ({"config": LLAMA, "revision": "main"}, "revision"),
        ({"config": LLAMA, "data": " "}, "data"),
        ({"config": LLAMA, "sise": 3}, "workload"),
    ],
)
def test_a_description_is_checked_without_torch(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingsError) as error:
        HuggingFaceWorkload.from_dict({"kind": "huggingface", **fields})
    assert error.value.field == field


def test_a_description_survives_a_round_trip() -> None:
    workload = described("x")
    assert HuggingFaceWorkload.from_dict(json.loads(json.dumps(workload.to_dict()))) == workload


def test_bytes_are_their_own_tokens() -> None:
    tokenizer = byte_tokenizer()
    text = "Motu, île, 島, \N{DESERT ISLAND}\x00\n"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def train(uri: Path, workload: HuggingFaceWorkload, **settings: Any) -> None:
    chosen = {
        "num_replicas": 1,
        "sync_every": 4,
        "total_rounds": 3,
        "batch_size": 8,
        "warmup_steps": 0,
        "inner_lr": 0.01,
        **settings,
    }
    create_group(str(uri), GroupSettings(**chosen), workload=workload.to_dict(), name="islands")
    assert replica.run(str(uri), 0) == 0


def test_a_run_ends_as_a_directory_for_from_pretrained(
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exported directory, with its tokenizer, can start the next run."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from diloco import export

    monkeypatch.setattr("diloco.training.sample.SAMPLE_S", 600.0)  # also on a busy machine
    uri, folder = tmp_path / "run", tmp_path / "model"
    workload = described(text_file, config={**LLAMA, "tie_word_embeddings": True})
    train(uri, workload)
    assert export.main([str(uri), str(folder)]) == 0
    assert "islands: final weights, round 3" in capsys.readouterr().out
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in folder.iterdir()
    }
    training = loaded(workload)
    result = training.evaluate(model)
    summary = json.loads(next(uri.glob("final/*/summary.json")).read_text())
    (measured,) = ModelCard.load(folder / "README.md").data.eval_results
    assert (measured.metric_type, measured.metric_value) == ("loss", summary["eval_loss"])
    assert result.loss == pytest.approx(summary["eval_loss"])
    assert result.loss < training.evaluate(training.build_model()).loss
    ids = tokenizer("Island", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=4, do_sample=False).shape == (1, 10)
    *_, text = training.go_on(model, b"Island ", 12, temperature=0.0, seed=0)
    assert len(text) >= 12
    sample = FinalSample.from_bytes(next(uri.glob("final/*/sample.json")).read_bytes())
    *_, drawn = training.go_on(model, b"", SAMPLE_BYTES, temperature=TEMPERATURE, seed=SEED)
    assert (sample.round, sample.prompt, sample.whole) == (3, "", True)
    assert sample.text == drawn[:SAMPLE_BYTES].decode(errors="replace")

    onward = loaded(described(text_file, config={}, model=str(folder)))
    assert torch.equal(weights(onward.build_model()), weights(model))
    assert onward._tokenizer.size == 256


def test_a_run_that_has_not_ended_exports_its_checkpoint(text_file: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from diloco import export

    uri = tmp_path / "run"
    train(uri, described(text_file), checkpoint_every=1)
    (uri / "final" / "manifest.json").unlink()
    line = export.export(export.open_store(str(uri)), tmp_path / "model")
    assert "checkpoint, round 3" in line
    published = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert weights(published).numel() > 0


def test_other_runs_cannot_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from diloco import export

    assert export.main([str(tmp_path / "none"), str(tmp_path / "model")]) == 1
    assert "expected group.json" in capsys.readouterr().err
    with pytest.raises(ValueError, match="only such a run can be exported"):
        export.build({"kind": "byte_gpt"})
    with pytest.raises(ValueError, match="weights: expected weight of shape"):
        load_into(nn.Linear(2, 2), {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)})


def test_hub_errors_are_shown_and_results_uploaded(text_file: Path, tmp_path: Path) -> None:
    """In a separate process, because the Hub's client reads its address when it is imported."""
    train(tmp_path / "run", described(text_file))
    code = (
        "import sys\n"
        "from diloco import export\n"
        "from diloco.protocol.settings import SettingsError\n"
        "from diloco.workloads.tokens import load_tokenizer, hub_is_there\n"
        "assert hub_is_there()\n"
        "for name in ('islands/gated', 'islands/absent'):\n"
        "    try:\n"
        "        load_tokenizer(name)\n"
        "    except SettingsError as error:\n"
        "        print(error)\n"
        "sys.exit(export.main(sys.argv[1:]))\n"
    )
    with running_model_hub() as hub:
        folders = (tmp_path / "run", tmp_path / "model")
        done = torch_process.run(
            ["-c", code, *folders, "--push-to-hub", "islands/trained", "--private"],
            env={**os.environ, **hub.env, "HF_HOME": str(tmp_path / "hf")},
        )
        assert done.returncode == 0, done.stderr
        assert "gated repo" in done.stdout
        assert "is not a local folder and is not a valid model identifier" in done.stdout
        assert hub.created == [
            {"name": "trained", "organization": "islands", "visibility": "private"}
        ]
        pushed = hub.files["model.safetensors"]
        assert pushed == (tmp_path / "model" / "model.safetensors").read_bytes()
        assert {"config.json", "tokenizer.json", "README.md"} <= set(hub.files)
