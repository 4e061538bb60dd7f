"""Benchmark tasks of lm-eval with local definitions and data, on a hand-made model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.evaluate import main
from diloco.evaluation.language_model import Bytes, LanguageModel, language_model
from diloco.exit_codes import EX_CONFIG
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.settings import GroupSettings
from tests.diloco.evaluation.runs import WORKLOAD, make_run, parrot, write_checkpoint

CHOICE = """
task: repeats
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{[good, bad]}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list:
  - metric: acc
"""
TEXT = """
task: whole_texts
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: byte_perplexity
"""
ANSWER = """
task: answers
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{good}}}}"
generation_kwargs:
  until: ["#"]
  max_gen_toks: 3
metric_list:
  - metric: exact_match
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks on rows whose right answer repeats the last byte; a third of them is wrong."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"text": f"x{letter}", "good": letter * 3, "bad": "zzz"} for letter in "abcd"]
    rows += [{"text": "xq", "good": "zzz", "bad": "qqq"} for _ in range(2)]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choice", CHOICE), ("text", TEXT), ("answer", ANSWER)):
        (folder / f"{name}.yaml").write_text(text.format(file=file))
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
def test_tasks_of_a_run(tmp_path: Path, tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_run(tmp_path / "run")
    write_checkpoint(store, 5, parrot(sharpness=10.0))
    arguments = ["--tokens", "0", "--tasks", "repeats,whole_texts,answers"]
    assert main([store.uri, *arguments, "--task-folder", str(tasks), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    values = {metric["name"]: metric["value"] for metric in result["metrics"]}
    assert values["repeats_acc"] == pytest.approx(4 / 6)
    assert values["answers_exact_match"] == pytest.approx(4 / 6)
    assert math.isfinite(values["whole_texts_byte_perplexity"])
    assert result["harness"].startswith("0.4.")
    [accuracy] = [m for m in result["metrics"] if m["name"] == "repeats_acc"]
    assert 0 < accuracy["stderr"] < 0.5


def test_an_unknown_task_is_refused_by_name(
    tmp_path: Path, tasks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    from diloco.evaluation import benchmark

    real = benchmark.TaskManager
    monkeypatch.setattr(  # the definitions of lm-eval are thousands of files
        benchmark, "TaskManager", lambda **more: real(**{**more, "include_defaults": False})
    )
    store = make_run(tmp_path / "run")
    write_checkpoint(store, 5, parrot())
    assert main([store.uri, "--tasks", "repeat", "--task-folder", str(tasks)]) == EX_CONFIG
    assert "tasks: expected tasks of lm-eval 0.4" in capsys.readouterr().err


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    document = GroupDocument(
        run_id="r", name="n", settings=GroupSettings(), workload=WORKLOAD.to_dict()
    )
    device = torch.device("cpu")
    module = parrot(sharpness=3.0)
    return language_model(document, device=device, module=module)


def test_scores_equal_those_of_each_text_alone(model: LanguageModel) -> None:
    """Padding and batches change nothing; a context that is too long loses its beginning."""
    from diloco.evaluation.benchmark import HarnessModel

    pairs = [(b"ab" * n, bytes([97 + n % 26]) * (1 + n % 4)) for n in (1, 3, 40, 63, 64, 80, 100)]
    requests = [(None, list(context), list(answer)) for context, answer in pairs]
    found = HarnessModel(model)._loglikelihood_tokens(requests)
    for (context, answer), (score, is_greedy) in zip(pairs, found, strict=True):
        whole = torch.tensor([list((context + answer)[-129:])])
        log = model.logits(whole[:, :-1]).log_softmax(-1)[0, -len(answer) :]
        target = whole[0, -len(answer) :]
        assert score == pytest.approx(float(log.gather(1, target[:, None]).sum()), rel=1e-4)
        assert is_greedy == bool((log.argmax(-1) == target).all())


def test_a_long_text_is_scored_to_the_last_token(model: LanguageModel) -> None:
    from diloco.evaluation.benchmark import HarnessModel

    class Request:
        args = ("abc" * 100,)

    [score] = HarnessModel(model).loglikelihood_rolling([Request()])
    tokens = [ord("\n"), *b"abc" * 100]
    expected = 0.0
    for start in (0, 128, 256):  # disjoint windows of the context, the last with all its context
        end = min(start + 128, 300)
        first = max(0, end - 128)
        row = torch.tensor([tokens[first : end + 1]])
        log = model.logits(row[:, :-1]).log_softmax(-1)[0, -(end - start) :]
        expected += float(log.gather(1, row[0, -(end - start) :, None]).sum())
    assert score == pytest.approx(expected, rel=1e-4)


def test_bytes_round_trip() -> None:
    assert Bytes().decode(list(Bytes().encode(["é#"])[0])).decode() == "é#"
