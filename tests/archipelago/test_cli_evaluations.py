"""The commands about evaluations against a live server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from runs.models import Checkpoint, Evaluation
from tests.browser import seed, seed_evaluations

pytestmark = pytest.mark.django_db(transaction=True)

Call = Callable[..., Any]


@pytest.fixture
def run(signed_in: str) -> Any:
    created = seed.run(seed.user("owner", "operator"), name="Evaluated", committed=3, replicas=1)
    Checkpoint.objects.create(
        run=created, round=2, key="k", size_bytes=1, digest="d" * 64, created_at=created.created_at
    )
    return created


def test_a_plan_is_added_changed_listed_and_removed(call: Call, run: Any) -> None:
    assert call("evaluation-plan", "last", "bench", "--tokens", "0").err == (
        "archipelago: tokens: enter a number of tokens or a task, found neither\n"
    )
    added = call(
        "evaluation-plan", "last", "bench", "--tokens", "0", "--tasks", "arc_easy,hellaswag"
    )
    assert (added.code, added.out) == (0, "Evaluated, bench: added\n")
    assert call("evaluation-plan", "last", "bench", "--every", "5").out.endswith("changed\n")
    listed = call("evaluation-plan", "last").out.splitlines()
    assert listed[1].split() == [
        *("bench", "own", "held-out", "data", "arc_easy,hellaswag", "every", "5", "local", "cpu")
    ]
    [raw] = json.loads(call("evaluation-plan", "last", "--json").out)
    assert (raw["every"], raw["tokens"]) == (5, 0)
    assert call("evaluation-plan", "last", "bench", "--remove").out.endswith("removed\n")
    assert call("evaluation-plan", "last", "bench", "--remove").out.endswith("not found\n")


def test_evaluate_and_cancel(call: Call, run: Any) -> None:
    assert "none yet; add one with" in call("evaluate", "last").err
    seed_evaluations.evaluations(run)
    assert call("evaluate", "last").out == "Evaluated, val of newest checkpoint: queued\n"
    again = call("evaluate", "last", "val", "--round", "2")
    assert again.out == "Evaluated, val of round 2: is queued, runs or was done already\n"
    assert call("evaluate", "last", "--cancel").err.endswith("expected --round with --cancel\n")
    cancelled = call("evaluate", "last", "--round", "2", "--cancel")
    assert cancelled.out == "Evaluated, val of round 2: is being cancelled\n"
    refused = call("evaluate", "last", "--round", "7")
    assert refused.code and "expected a round with a checkpoint, found 7" in refused.err


def test_results_and_logs(call: Call, run: Any) -> None:
    plan = seed_evaluations.evaluations(run, 2, tasks=("arc_easy",))
    seed_evaluations.queue(plan, 3, state="failed", message="no\x1b[2J data")
    lines = call("evaluations", "last").out.splitlines()
    assert lines[0].split() == ["ID", "EVALUATION", "ROUND", "STATE", "RESULT"]
    assert "failed" in lines[1] and "\x1b" not in lines[1]
    assert lines[2].endswith("loss 3.234, perplexity 25.39, arc_easy_acc 0.29")
    newest = Evaluation.objects.get(round=3)
    log = call("evaluations", "last", "--log", str(newest.pk))
    assert "reading the shards" in log.out
    rows = json.loads(call("evaluations", "last", "--json").out)
    assert [row["round"] for row in rows] == [3, 2]
