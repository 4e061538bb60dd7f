"""An evaluation as a process of this machine or of an emulated backend: from the checkpoint to the
points of the run."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from diloco.protocol import keys
from diloco.protocol.evaluation import EvaluationSpec
from runs.actions import evaluations
from runs.credentials.vault import seal
from runs.evaluations import advance, schedule
from runs.metrics import charts
from runs.models import Checkpoint, Credential, Evaluation, EvaluationAttempt, Run
from runs.states import RunState
from runs.submit.evaluation_plans import draft_of
from runs.submit.run_draft import PlanDraft
from tests.diloco.evaluation.runs import make_run, make_shards, parrot, write_checkpoint
from tests.emulators.modal import ModalServer
from tests.servers import wait_until

pytestmark = pytest.mark.processes


@pytest.fixture
def measured(db: None, tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run with one checkpoint, and a plan that measures it on token shards."""
    from tests.browser import seed

    settings.VAR_DIR = tmp_path / "var"
    monkeypatch.setattr("runs.live_stream.publish", lambda run_id, delta: True)
    for module in ("evaluations.schedule", "actions.evaluations"):
        monkeypatch.setattr(f"runs.{module}.enqueue", lambda task, *args, **more: None)
    store = make_run(tmp_path / "run")
    manifest = write_checkpoint(store, 5, parrot())
    run: Run = seed.run(seed.user("olga", "operator"), committed=0, replicas=1)
    Run.objects.filter(pk=run.pk).update(rendezvous=store.uri, state=RunState.SUCCEEDED)
    run.refresh_from_db()
    Checkpoint.objects.create(
        run=run, round=5, key=manifest.weights.key, size_bytes=manifest.weights.size_bytes,
        digest=manifest.weights.digest, created_at=timezone.now(),
    )  # fmt: skip
    shards = make_shards(tmp_path / "shards", b"a" * 500 + b"b" * 3000)
    draft = PlanDraft(name="val", spec=EvaluationSpec(data=shards, tokens=1024))
    evaluations.save_plan(run, draft, actor=run.owner)
    return run


def step_until(condition: Callable[[], bool]) -> None:
    """Make steps as the workers do, until the condition holds."""

    def step() -> bool:
        if condition():
            return True
        schedule.call_for_due()
        Evaluation.objects.update(next_at=timezone.now())
        for pk in Evaluation.objects.values_list("pk", flat=True):
            advance.advance(pk)
        return False

    wait_until(step, "the evaluation did not end", every_s=0.2)


def has_ended() -> bool:
    return Evaluation.objects.exclude(state__in=Evaluation.ACTIVE).exists()


def test_a_killed_job_is_repeated_and_its_result_drawn_once(measured: Run, tmp_path: Path) -> None:
    step_until(lambda: EvaluationAttempt.objects.filter(launched_at__isnull=False).exists())
    first = EvaluationAttempt.objects.get()
    handle = tmp_path / "var" / "jobs" / first.launch_key / "handle.json"
    step_until(handle.exists)
    os.kill(json.loads(handle.read_text())["pid"], signal.SIGKILL)  # the shim, and with it the job
    step_until(has_ended)
    row = Evaluation.objects.get()
    assert row.state == "succeeded", (row.message, row.attempts.last().log)
    assert [a.cause for a in row.attempts.all()] == ["lost", "done"]
    assert row.failures == 1
    assert 0 < row.metrics["loss"][0] < 0.2
    assert row.tokens == 1024
    [curve] = charts.read(measured, [("eval-val-loss", None)], charts.Window())
    assert curve.points.value.tolist() == [row.metrics["loss"][0]]
    from runs.ingest.stores import store_for

    stored = [info.key for info in store_for(measured).list(keys.EVALUATIONS)]
    assert len(stored) == 1


@pytest.fixture
def modal(tmp_path: Path) -> Iterator[Credential]:
    """A credential of an account with an emulated Modal, whose Sandboxes are processes."""
    with ModalServer(tmp_path / "modal") as server:
        token_id, token_secret = server.token
        token = {"MODAL_TOKEN_ID": token_id, "MODAL_TOKEN_SECRET": token_secret}
        values = token | {"MODAL_SERVER_URL": server.url}
        now = timezone.now()
        yield Credential.objects.create(
            name="modal", kind="modal", sealed=seal(values), created_at=now, changed_at=now
        )


@pytest.mark.slow
def test_a_job_on_another_backend_reports_its_error_and_then_its_result(
    measured: Run, modal: Credential, tmp_path: Path
) -> None:
    draft = draft_of(measured.evaluation_plans.get())
    draft = replace(draft, backend="modal", hardware="cpu", credential=modal.pk)
    evaluations.save_plan(measured, draft, actor=measured.owner)
    index = tmp_path / "shards" / "index.json"
    index.rename(away := index.with_name("away"))
    step_until(has_ended)
    row = Evaluation.objects.get()
    assert row.state == "failed"
    assert row.message.startswith("data: expected token shards at file://")
    assert row.attempts.get().handle["backend"] == "modal"
    away.rename(index)
    evaluations.evaluate(measured, "val", actor=measured.owner)
    step_until(has_ended)
    row.refresh_from_db()
    assert (row.state, row.tokens, row.failures) == ("succeeded", 1024, 0)
    assert 0 < row.metrics["loss"][0] < 0.2
    assert row.attempts.count() == 2
