"""The upload of a Transformers model is a directory that ``from_pretrained`` loads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save as save_safetensors

from diloco.model import named_parameters
from diloco.protocol import keys
from diloco.protocol.records import FinalManifest
from diloco.protocol.workload import HuggingFaceWorkload
from diloco.workloads.tokens import byte_tokenizer, load_tokenizer
from runs.export import hub_files, model_card
from runs.ingest.stores import store_for
from runs.models import Checkpoint, Run
from tests.model_hub import ModelHub, running_model_hub
from tests.runs.export.test_hub_upload import credential, put, upload
from tests.runs.run_harness import identity

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.django_db

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
TIED = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 256,
    "tie_word_embeddings": True,
}
TEXT = "Grüße, 島 & \x00\x7f 🏝"


@pytest.fixture(scope="module")
def hub() -> Iterator[ModelHub]:
    with running_model_hub() as hub:
        yield hub


@pytest.fixture
def harness(make_harness: Callable[..., Any], hub: ModelHub) -> Any:
    hub.files.clear()
    hub.others.clear()
    return make_harness(replicas=2)


class Made:
    """A run of that workload, its model, and its weights in the bucket."""

    def __init__(self, harness: Any, *, final: bool, **workload: Any) -> None:
        from diloco import export
        from diloco.workloads.huggingface import model_config

        self.workload = HuggingFaceWorkload(**workload)
        Run.objects.filter(pk=harness.run.pk).update(workload=self.workload.to_dict())
        harness.run.refresh_from_db()
        config = model_config(
            HuggingFaceWorkload(config=workload.get("config", LLAMA)), load_tokenizer("bytes")
        )
        torch.manual_seed(3)
        self.model: PreTrainedModel = export.build(config.to_dict())
        every = dict(named_parameters.state(self.model))
        trained = dict(named_parameters.trained(self.model))
        tensors = every if final else {name: every[name] for name in trained}
        data = save_safetensors({n: t.detach().contiguous() for n, t in tensors.items()})
        store = store_for(harness.run)
        who = identity(0).incarnation
        folder = keys.final_dir(0, who) if final else keys.checkpoint_dir(7, 0, who)
        name = "model" if final else "weights"
        weights = put(store, f"{folder}{name}.safetensors", data)
        self.config = json.dumps(self.model.config.to_dict()).encode()
        if final:
            manifest = FinalManifest(
                round=7,
                reason="completed",
                writer=identity(0),
                weights_digest="d",
                weights=weights,
                config=put(store, f"{folder}config.json", self.config),
                summary=put(store, f"{folder}summary.json", b"{}"),
                wall_s=1.0,
            )
            store.create(keys.FINAL_MANIFEST, manifest.to_bytes())
        self.checkpoint = Checkpoint.objects.create(
            run=harness.run,
            round=7,
            final=final,
            key=weights.key,
            size_bytes=weights.size_bytes,
            digest=weights.sha256,
            created_at=harness.clock(),
        )


def directory(hub: ModelHub, folder: Path) -> Path:
    folder.mkdir()
    for name, data in hub.files.items():
        (folder / name).write_bytes(data)
    return folder


def same_model(ours: PreTrainedModel, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded, message = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not message["missing_keys"], message
    assert not message["unexpected_keys"], message
    tokens = torch.arange(40).reshape(1, 40)
    with torch.no_grad():
        wanted, result = ours.eval()(tokens).logits, loaded.eval()(tokens).logits
    assert torch.equal(wanted, result)


@pytest.mark.parametrize("config", [LLAMA, TIED], ids=["llama", "tied"])
@pytest.mark.parametrize("final", [True, False], ids=["final", "checkpoint"])
def test_an_uploaded_model_loads_and_computes_the_same(
    harness: Any, hub: ModelHub, tmp_path: Path, config: dict[str, Any], final: bool
) -> None:
    from transformers import AutoTokenizer

    made = Made(harness, final=final, config=config)
    reported = upload(made.checkpoint, credential(harness, hub.url))
    kind = "final" if final else "checkpoint"
    assert reported == f"info: {kind} @ 7 is at {hub.url}/islands/trained"
    folder = directory(hub, tmp_path / "model")
    same_model(made.model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(TEXT)["input_ids"] == list(TEXT.encode())
    assert tokenizer.decode(list(TEXT.encode())) == TEXT
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    card = (folder / "README.md").read_text()
    assert "library_name: transformers" in card
    assert "`AutoModelForCausalLM.from_pretrained`" in card


def test_the_byte_tokenizer_is_the_replicas_own(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for name, data in hub_files.byte_tokenizer_files().items():
        (tmp_path / name).write_bytes(data)
    ours, other = AutoTokenizer.from_pretrained(tmp_path), byte_tokenizer()
    assert ours.get_vocab() == other.get_vocab()
    assert len(ours) == 256
    for token in range(256):
        assert ours.decode([token]) == other.decode([token])
    assert ours(TEXT)["input_ids"] == other(TEXT)["input_ids"]


def test_tokenizer_and_config_come_from_the_hub_model(
    harness: Any, hub: ModelHub, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    made = Made(harness, final=False, model="islands/base")
    hub.others["islands/base"] = {
        "config.json": made.config,
        **hub_files.byte_tokenizer_files(),
        "README.md": b"theirs",
        "model.safetensors": b"theirs",
    }
    reported = upload(made.checkpoint, credential(harness, hub.url))
    assert reported == f"info: checkpoint @ 7 is at {hub.url}/islands/trained"
    assert set(hub.files) == {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    }
    folder = directory(hub, tmp_path / "model")
    same_model(made.model, folder)
    assert AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"] == list(TEXT.encode())


@pytest.mark.parametrize(
    ("workload", "why"),
    [
        ({"model": "islands/gone"}, "config.json of islands/gone"),
        ({"config": LLAMA, "tokenizer": "islands/gated"}, "the tokenizer islands/gated: 403"),
        ({"config": LLAMA, "tokenizer": "/data/words"}, "/data/words is a directory"),
    ],
)
def test_missing_files_are_reported_and_the_weights_are_uploaded(
    harness: Any, hub: ModelHub, workload: dict[str, Any], why: str
) -> None:
    made = Made(harness, final="config" in workload, **workload)
    reported = upload(made.checkpoint, credential(harness, hub.url))
    assert reported.startswith("info: ")
    assert "; without " in reported
    assert why in reported
    assert "model.safetensors" in hub.files
    assert "Not uploaded: " in hub.files["README.md"].decode()


def test_a_checkpoint_takes_the_config_of_the_run_s_final_weights(
    harness: Any, hub: ModelHub, tmp_path: Path
) -> None:
    made = Made(harness, final=True, config=LLAMA, tokenizer="islands/words")
    hub.others["islands/words"] = hub_files.byte_tokenizer_files()
    store = store_for(harness.run)
    folder = keys.checkpoint_dir(7, 0, identity(0).incarnation)
    copied = put(store, f"{folder}weights.safetensors", store.get(made.checkpoint.key))
    Checkpoint.objects.filter(pk=made.checkpoint.pk).update(final=False, key=copied.key)
    made.checkpoint.refresh_from_db()
    upload(made.checkpoint, credential(harness, hub.url))
    assert hub.files["config.json"] == made.config
    same_model(made.model, directory(hub, tmp_path / "model"))


def test_weights_are_streamed_in_pieces(
    harness: Any, hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that end within the header, and within a tensor."""
    made = Made(harness, final=True, config=LLAMA)
    monkeypatch.setattr("runs.ingest.objects.PIECE_BYTES", 97)
    path = tmp_path / "model.safetensors"
    hub_files.fetch_weights(store_for(harness.run), made.checkpoint, path, as_model=True)
    with safe_open(path, "pt") as file:
        for name, tensor in named_parameters.state(made.model):
            assert torch.equal(file.get_tensor(name), tensor)


def test_a_file_that_is_not_safetensors_is_unchanged(
    harness: Any, hub: ModelHub, tmp_path: Path
) -> None:
    store = store_for(harness.run)
    for data in (b"", b"short", b"\xff" * 64, b"\x04" + b"\x00" * 7 + b"[1,]x", bytes(range(256))):
        folder = keys.checkpoint_dir(1, 0, identity(0).incarnation)
        stored = put(store, f"{folder}weights.safetensors", data)
        row = Checkpoint(
            run=harness.run,
            round=1,
            key=stored.key,
            size_bytes=stored.size_bytes,
            digest=stored.sha256,
        )
        hub_files.fetch_weights(store, row, tmp_path / "odd", as_model=True)
        assert (tmp_path / "odd").read_bytes() == data


def test_another_workload_is_not_converted(harness: Any) -> None:
    row = Checkpoint(run=harness.run)
    assert hub_files.workload_of(row) is None
    harness.run.workload = {"kind": "huggingface", "of a version to come": 1}
    assert hub_files.workload_of(row) is None
    assert "does not load it" in model_card.card(
        Checkpoint(run=harness.run, round=1, digest="d"), "a/b", config=False
    )
