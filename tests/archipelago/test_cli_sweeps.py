"""The commands clone, sweep, sweeps and stop-sweep, and YAML documents, against a live server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archipelago.errors import Invalid
from archipelago.sweep_commands import set_field
from runs.models import Run, Sweep
from tests.browser import seed

pytestmark = pytest.mark.django_db(transaction=True)

Call = Callable[..., Any]
DOCUMENT = {"name": "swept", "pools": [{"count": 1}], "settings": {"warmup_steps": 5}}


@pytest.fixture(autouse=True)
def _no_remote_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "runs.submit.preflight.check_runs", lambda drafts, **_: [[] for _ in drafts]
    )


@pytest.fixture
def document(tmp_path: Path, settings: Any, signed_in: str) -> str:
    settings.DEFAULT_RENDEZVOUS = (tmp_path / "rendezvous").as_uri()
    path = tmp_path / "run.json"
    path.write_text(json.dumps(DOCUMENT))
    return str(path)


def test_a_sweep_is_planned_created_ranked_and_stopped(call: Call, document: str) -> None:
    over = ("--over", "inner_lr=1e-4, 1e-3", "--over", "workload.size=demo,micro")
    plan = call("sweep", document, *over, "--plan")
    assert plan.code == 0, plan.err
    assert plan.out.split()[:2] == ["runs", "4"]
    assert not Run.objects.exists()
    made = call("sweep", document, *over, "--parallel", "1")
    assert made.code == 0, made.err
    [sweep] = Sweep.objects.all()
    assert f"/sweeps/{sweep.pk}" in made.err
    assert made.out.count("held") == 3
    sweep.runs.filter(sweep_index=2).update(eval_loss=2.5)
    [heads, first, *_] = call("sweeps", "last").out.splitlines()
    assert heads.split() == ["RANK", "EVAL_LOSS", "INNER_LR", "SIZE", "STATE", "RUN"]
    assert first.split()[:4] == ["1", "2.5", "0.001", "demo"]
    assert call("sweeps").out.splitlines()[1].split()[:6] == [
        str(sweep.pk)[:8],
        "swept",
        "4",
        "1",
        "3",
        "0",
    ]
    body = json.loads(call("sweeps", "swept", "--json", "--rank", "tokens_per_s").out)
    assert body["metric"] == "tokens_per_s"
    assert call("stop-sweep", str(sweep.pk)[:8]).out == "4 runs stopped\n"


def test_a_refused_sweep_names_the_field(call: Call, document: str) -> None:
    for more in ((), ("--plan",)):
        refused = call("sweep", document, "--over", "inner_lr=1, 99", *more)
        assert refused.code == Invalid.exit_code
        assert "sweep: settings.inner_lr: expected 10 or less, found 99" in refused.err
    assert call("sweep", document, "--over", "inner_lr").code == Invalid.exit_code
    assert call("sweeps", "nothing").code == Invalid.exit_code


def test_clone_changes_fields_and_shows_them(
    call: Call, document: str, tmp_path: Path, signed_in: str
) -> None:
    run = seed.run(seed.user("owner", "operator"), name="Source", replicas=1)
    Run.objects.update(rendezvous=(tmp_path / "rendezvous" / str(run.pk)).as_uri())
    made = call("clone", str(run.pk), "--set", "inner_lr=0.00123", "--name", "Changed")
    assert made.code == 0, made.err
    assert "inner_lr: 0.0004 -> 0.00123" in made.err
    assert Run.objects.get(name="Changed").settings.inner_lr == 0.00123
    swept = call("clone", str(run.pk), "--over", "seed=1,2,3", "-q")
    assert Sweep.objects.get(pk=swept.out.strip()).runs.count() == 3
    wrong = call("clone", str(run.pk), "--set", "nothing=1")
    assert (wrong.code, "'nothing'" in wrong.err) == (Invalid.exit_code, True)


def test_a_yaml_document_is_parsed_by_the_server(call: Call, document: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: From YAML\npools: [{count: 1}]\nsettings: {dylu: on, warmup_steps: 5}\n")
    assert call("plan", str(path), "--offline").code == 0
    assert call("submit", str(path), "-q").code == 0
    assert Run.objects.get().settings.dylu == "on"
    path.write_text("name: [")
    assert call("submit", str(path)).code != 0


@pytest.mark.parametrize(
    ("field", "before"),
    [("settings.a", 1), ("a", 1), ("pools.0.count", 2), ("name", "x")],
)
def test_set_field(field: str, before: Any) -> None:
    document = {"name": "x", "settings": {"a": 1}, "pools": [{"count": 2}]}
    assert set_field(document, field, 9) == before
    assert set_field(document, field, 8) == 9


@pytest.mark.parametrize("field", ["b", "settings.b", "pools.1.count", "pools.x", "name.x", ""])
def test_an_unknown_field_is_refused(field: str) -> None:
    with pytest.raises(Invalid):
        set_field({"name": "x", "settings": {"a": 1}, "pools": [{"count": 2}]}, field, 9)
