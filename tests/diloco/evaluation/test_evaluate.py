"""``python -m diloco.evaluate`` on hand-made checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.evaluate import main
from diloco.evaluation.measure import store_result, stored_result
from diloco.evaluation.weights import find_weights
from diloco.exit_codes import EX_CONFIG
from diloco.protocol import keys
from diloco.protocol.evaluation import EvaluationResult, EvaluationSpec
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import CustomWorkload
from diloco.store.base import LocalStore
from tests.diloco.evaluation.runs import WORKLOAD, make_run, make_shards, parrot, write_checkpoint


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    text = b"".join(bytes([letter]) * 600 for letter in b"abcdefghijkl")
    return make_shards(tmp_path_factory.mktemp("shards"), text)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = make_run(tmp_path / "run")
    write_checkpoint(made, 5, parrot())
    return made


def evaluated(
    capsys: pytest.CaptureFixture[str], store: LocalStore, *arguments: str
) -> dict[str, Any]:
    assert main([store.uri, "--json", *arguments]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def metrics(result: dict[str, Any]) -> dict[str, float]:
    return {metric["name"]: metric["value"] for metric in result["metrics"]}


def failed(capsys: pytest.CaptureFixture[str], store: LocalStore, *arguments: str) -> str:
    assert main([store.uri, *arguments]) == EX_CONFIG
    return capsys.readouterr().err


def test_loss_and_perplexity_of_token_shards(
    store: LocalStore, shards: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = evaluated(capsys, store, "--data", shards, "--tokens", "2048")
    values = metrics(result)
    assert result["round"] == 5 and result["tokens"] == 2048
    assert 0 < values["loss"] < 0.2  # one byte of 600 differs from the one before it
    assert values["perplexity"] == pytest.approx(math.exp(values["loss"]))
    assert result["metrics"][0]["stderr"] > 0

    spec = EvaluationSpec(data=shards, tokens=2048)
    stored = EvaluationResult.read(store, keys.evaluation(5, spec.name))
    stored.check(round=5, spec=spec)
    assert keys.kind_of(keys.evaluation(5, spec.name)) == keys.Kind.EVALUATION


def test_the_loss_equals_that_of_the_whole_windows_at_once(
    store: LocalStore, shards: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from diloco.data.shard_index import read_index
    from diloco.data.shard_reader import held_out_windows
    from diloco.store.open import open_store

    opened = open_store(shards)
    windows = torch.from_numpy(
        held_out_windows(opened, read_index(opened), context=128, tokens=1280).astype("int64")
    )
    with torch.no_grad():
        logits = parrot()(windows[:, :-1])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    result = evaluated(capsys, store, "--data", shards, "--tokens", "1280")
    assert metrics(result)["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_without_data_the_workloads_own_held_out_text_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shards: str
) -> None:
    own = dataclasses.replace(WORKLOAD, data=shards, data_format="shards")
    store = make_run(tmp_path / "own", workload=own)
    write_checkpoint(store, 3, parrot())
    assert metrics(evaluated(capsys, store))["loss"] < 0.2


def test_a_repeated_evaluation_is_done_once(
    store: LocalStore, shards: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--data", shards, "--tokens", "512")
    first = evaluated(capsys, store, *arguments)
    again = evaluated(capsys, store, *arguments)
    assert again == first
    assert [info.key for info in store.list(keys.EVALUATIONS)] == [
        keys.evaluation(5, EvaluationSpec(data=shards, tokens=512).name)
    ]
    forced = evaluated(capsys, store, *arguments, "--again")
    assert metrics(forced) == metrics(first)


def test_two_processes_store_one_result(store: LocalStore, shards: str) -> None:
    spec = EvaluationSpec(data=shards)
    weights = find_weights(store)
    one, two = (result_of(spec, weights.stored.digest, value) for value in (1.0, 2.0))
    assert store_result(store, spec, one) == one
    assert store_result(store, spec, two) == one
    assert stored_result(store, spec, weights) == one


def test_a_damaged_result_and_one_of_other_weights_are_replaced(
    store: LocalStore, shards: str
) -> None:
    spec, weights = EvaluationSpec(data=shards), find_weights(store)
    result = result_of(spec, weights.stored.digest, 1.0)
    for other in (b"{", result_of(spec, "0" * 32, 9.0).to_bytes()):
        store.put(keys.evaluation(5, spec.name), other)
        assert stored_result(store, spec, weights) is None
        assert store_result(store, spec, result) == result


def result_of(spec: EvaluationSpec, digest: str, loss: float) -> EvaluationResult:
    from diloco.protocol.evaluation import EvaluationMetric

    return EvaluationResult(
        round=5,
        spec=spec.name,
        weights=digest,
        data="",
        metrics=(EvaluationMetric(name="loss", value=loss),),
        tokens=1,
        harness="",
        device="cpu",
        seconds=1.0,
        wall_s=1.0,
    )


def test_weights_of_a_round(
    store: LocalStore, shards: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(store, 10, parrot(sharpness=1.0))
    arguments = ("--data", shards, "--tokens", "512")
    newest = evaluated(capsys, store, *arguments)
    older = evaluated(capsys, store, *arguments, "--round", "5")
    assert (newest["round"], older["round"]) == (10, 5)
    assert metrics(newest)["loss"] > metrics(older)["loss"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--round", "4"], "expected weights of round 4"),
        (["--data", "file:///nowhere"], "expected token shards at file:///nowhere"),
        (["--tokens", "-1"], "tokens: enter a whole number from 0 to 1,000,000,000, found -1"),
        (["--tokens", "0"], "tokens: enter a number of tokens or a task, found neither"),
        (["--tasks", "a b"], "tasks: enter names of tasks such as arc_easy, found 'a b'"),
        (["--tasks", "a,a"], "tasks: enter each task once and at most 16"),
        (["--task-folder", "/nowhere"], "--task-folder: expected a folder, found /nowhere"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    store: LocalStore, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in failed(capsys, store, *arguments)
    assert not store.list(keys.EVALUATIONS)


def test_weights_that_were_deleted(
    store: LocalStore, shards: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store.delete([find_weights(store).stored.key])
    error = failed(capsys, store, "--data", shards)
    assert "only those of the newest two checkpoints are kept" in error


def test_nan_weights_write_no_result(
    tmp_path: Path, shards: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_run(tmp_path / "nan")
    model = parrot()
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    write_checkpoint(store, 5, model)
    error = failed(capsys, store, "--data", shards, "--tokens", "512")
    assert "loss: expected a finite number, found nan" in error
    assert not store.list(keys.EVALUATIONS)


def test_a_custom_workload_has_no_known_tokens(
    tmp_path: Path, shards: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own: Any = CustomWorkload(function="own:build")
    store = make_run(tmp_path / "custom", workload=own)
    write_checkpoint(store, 5, parrot())
    error = failed(capsys, store, "--data", shards)
    assert "evaluate it on its own data, without data and tasks" in error


def test_tasks_without_lm_eval_name_what_to_install(
    store: LocalStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "diloco.evaluation.benchmark", raising=False)
    error = failed(capsys, store, "--tasks", "arc_easy")
    assert "pip install 'archipelago-diloco[evaluation]'" in error


def test_a_model_of_an_own_loop_is_not_in_the_bucket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = LocalStore(tmp_path / "own_loop")
    document = GroupDocument(run_id="r", name="n", settings=GroupSettings(), workload={})
    store.create(keys.GROUP, document.to_bytes())
    write_checkpoint(store, 5, parrot())
    assert "Evaluate it in the loop with group.evaluate" in failed(capsys, store)
