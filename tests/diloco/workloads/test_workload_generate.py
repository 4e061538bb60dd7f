"""``python -m diloco.generate`` on hand-made results."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from diloco.generate import main
from diloco.protocol import keys
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.records import FinalManifest, Identity
from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import ByteGPTWorkload
from diloco.store.base import LocalStore
from diloco.training.final_result import publish_final
from diloco.training.stored_objects import put_object
from diloco.workloads.byte_gpt import ByteGPT, model_config
from tests.diloco.evaluation.runs import write_checkpoint

WORKLOAD = ByteGPTWorkload(size="demo")
WRITER = Identity(replica=0, incarnation=keys.incarnation(1, "0123abcd"))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "run")
    document = GroupDocument(
        run_id="r", name="by hand", settings=GroupSettings(), workload=WORKLOAD.to_dict()
    )
    assert store.create(keys.GROUP, document.to_bytes())
    return store


def parrot() -> ByteGPT:
    """A model that repeats the last byte: the blocks add nothing, and the embedding is sharp."""
    model = ByteGPT(WORKLOAD.shape)
    model.initialise(0)
    with torch.no_grad():
        model.embedding.weight.mul_(50)
    return model


def publish(store: LocalStore, model: ByteGPT) -> FinalManifest:
    publish_final(
        store,
        WRITER,
        round=7,
        reason="completed",
        tensors=model.state_dict(),
        weights_digest="",
        config=model_config(WORKLOAD),
        summary={},
        wall_s=0.0,
    )
    return FinalManifest.from_bytes(store.get(keys.FINAL_MANIFEST))


def republish(store: LocalStore, manifest: FinalManifest) -> None:
    store.put(keys.FINAL_MANIFEST, manifest.to_bytes())


def test_final_weights_round_trip(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    publish(store, parrot())
    assert main([store.uri, "--prompt", "abc", "--bytes", "5", "--temperature", "0"]) == 0
    out, err = capsys.readouterr()
    assert out == "abcccccc\n"
    assert err == "by hand: final weights, round 7\n"


def test_invalid_utf8_is_replaced(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    publish(store, parrot())
    assert main([store.uri, "--prompt", "é", "--bytes", "2", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "é\ufffd\ufffd\n"


def test_without_a_final_the_newest_checkpoint_is_used(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for round in (0, 5):
        write_checkpoint(store, round, parrot())
    assert main([store.uri, "--bytes", "0"]) == 0
    assert capsys.readouterr().err == "by hand: no final weights yet; newest checkpoint, round 5\n"


def failure(uri: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([uri, *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_a_uri_without_a_run_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = failure(str(tmp_path / "nothing"), capsys)
    assert error.startswith("error: expected a run at file://")
    assert "found no group.json" in error


def test_a_run_without_weights_is_an_error(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    error = failure(store.uri, capsys)
    assert "expected weights of run 'by hand'" in error
    assert "found neither a final nor a checkpoint yet" in error


def test_damaged_weights(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = publish(store, parrot())
    store.put(manifest.weights.key, store.get(manifest.weights.key)[:-1] + b"!")
    error = failure(store.uri, capsys)
    assert f"model.safetensors: expected checksum {manifest.weights.checksums}" in error


def test_missing_weights(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    store.delete([publish(store, parrot()).weights.key])
    assert "model.safetensors that a manifest names, found none" in failure(store.uri, capsys)


def test_not_safetensors(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = publish(store, parrot())
    pickled = put_object(store, manifest.weights.key, b"\x80\x04N.")
    republish(store, dataclasses.replace(manifest, weights=pickled))
    assert "expected safetensors, found" in failure(store.uri, capsys)


def test_weights_of_another_shape(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = publish(store, parrot())
    last = WORKLOAD.shape.layers - 1
    config = json.loads(store.get(manifest.config.key)) | {"layers": last}
    other = put_object(store, manifest.config.key, json.dumps(config).encode())
    republish(store, dataclasses.replace(manifest, config=other))
    error = failure(store.uri, capsys)
    assert f"expected blocks.{last}.attention_in.weight of shape None" in error


def test_the_model_of_a_loop(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = publish(store, parrot())
    republish(
        store, dataclasses.replace(manifest, config=put_object(store, manifest.config.key, b"{}"))
    )
    assert "found none: the model of a loop is not in the bucket" in failure(store.uri, capsys)


def test_bad_arguments(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--bytes: expected 0 or more, found -1" in failure(store.uri, capsys, "--bytes", "-1")
    publish(store, parrot())
    assert main([store.uri, "--temperature", "-2"]) == 1
    assert "temperature: expected 0 or more, found -2" in capsys.readouterr().err
