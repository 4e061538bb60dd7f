"""The submit form filled in from a pasted document, its unique name, and the diff of a clone."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterable
from typing import Any

import hypothesis
import pytest
from django.test import Client
from django.utils import timezone
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from archipelago.documents import EXAMPLE
from dashboard.api.document import document_of
from dashboard.forms import PoolChoices, RunForm, initial_from, pasted
from diloco.protocol.evaluation import EvaluationSpec
from diloco.protocol.settings import setting_fields
from diloco.protocol.workload import WORKLOADS
from runs.actions.budgets import save_budget
from runs.models import ExperimentTracker, Run, Sweep, Webhook
from runs.submit import run_draft
from runs.submit.evaluation_plans import draft_of
from runs.submit.run_draft import PlanDraft, PoolDraft
from tests.dashboard.test_submit import filled
from tests.matrix import matrix

pytestmark = pytest.mark.django_db


def tracker(name: str, *, enabled: bool = True) -> ExperimentTracker:
    return ExperimentTracker.objects.create(
        name=name, kind="tensorboard", enabled=enabled, created_at=timezone.now()
    )


def paste(client: Client, text: str) -> Any:
    response = client.post("/runs/new", filled(client) | {"document": text, "paste": "1"})
    assert response.status_code == 200
    assert not Run.objects.exists()
    return response.context["form"]


@pytest.mark.parametrize("name", run_draft.TEMPLATES)
def test_the_document_of_a_template_fills_the_whole_form(
    client: Client, operator_user: Any, name: str
) -> None:
    draft = run_draft.TEMPLATES[name].make()
    form = paste(client, json.dumps(document_of(draft)))
    assert form.all_errors == {}
    assert form.draft() == draft


EVALUATIONS = (
    PlanDraft(name="val", every=3, timeout_s=5400),
    PlanDraft(name="bench", spec=EvaluationSpec(tokens=0, tasks=("arc_easy", "piqa"), examples=9)),
)


def test_evaluations_of_a_document_become_rows_and_plans(
    client: Client, operator_user: Any
) -> None:
    draft = dataclasses.replace(run_draft.local_demo(), evaluations=EVALUATIONS)
    form = paste(client, json.dumps(document_of(draft)))
    assert form.draft() == draft
    sent = form.data.dict()
    # The buttons of a row post the whole form, which comes back with its input.
    answer = client.post("/runs/new", sent | {"add_evaluation": "1"})
    assert [row.index for row in answer.context["form"].evaluations] == [0, 1, 2]
    answer = client.post("/runs/new", sent | {"remove_evaluation": "0"})
    [row] = answer.context["form"].evaluations
    assert (row.index, row["tasks"].value()) == (1, "arc_easy, piqa")
    assert client.post("/runs/new", sent).status_code == 302
    assert [draft_of(plan) for plan in Run.objects.get().evaluation_plans.all()] == [*EVALUATIONS]


def test_a_wrong_evaluation_is_refused_at_its_field(client: Client, operator_user: Any) -> None:
    plans = [{"name": "val", "hardware": "Q100", "size": 1}, {"name": "Bad", "tasks": ["a/b c"]}, 3]
    form = paste(client, json.dumps({"name": "x", "pools": [{}], "evaluations": plans}))
    errors = form.all_errors
    assert set(errors) == {"document", "evaluations.0.where", "evaluations.2.name"}
    assert "evaluations.0.size: expected no such field" in "\n".join(errors["document"])
    twice = [{"name": "val", "hardware": "cpu"}, {"name": "val", "tasks": ["a/b c"]}]
    form = paste(client, json.dumps({"name": "x", "pools": [{}], "evaluations": twice}))
    assert set(form.all_errors) == {"evaluations.1.tasks"}
    sent = form.data.dict() | {"evaluations.1.tasks": ""}
    answer = client.post("/runs/new", sent)
    assert answer.status_code == 422
    assert answer.context["form"].all_errors == {
        "evaluations.1.name": ["enter another name; the run has this one"]
    }
    assert "s-evaluations" in answer.context["open"]
    assert not Run.objects.exists()


def test_the_example_of_the_command_line_can_be_pasted(client: Client, operator_user: Any) -> None:
    form = paste(client, EXAMPLE)
    assert form.all_errors == {}
    assert (form["name"].value(), form["sync_every"].value()) == ("First run", "90")
    assert form["outer_lr"].value() == "0.7"  # omitted: the default


def test_errors_of_a_document_are_at_their_fields(client: Client, operator_user: Any) -> None:
    form = paste(
        client,
        """
name: ""
settings: {sync_every: 0, dylu: on, nothing: 1, start_replicas: 3}
workload: {kind: byte_gpt, size: giant, colour: red}
pools:
  - {backend: modal, hardware: Q100, count: 0, spot: true, credential: none-like-it}
  - {count: [1], unknown: 2}
budget_usd: -1
time_limit_s: soon
notify: [nothing]
""",
    )
    errors = form.all_errors
    assert set(errors) >= {
        "name",
        "sync_every",
        "size",
        "pools.0.hardware",
        "pools.0.count",
        "pools.1.count",
        "budget_usd",
        "time_limit_s",
    }
    at_document = "\n".join(errors["document"])
    for message in (
        "settings.nothing: expected no such field",
        "settings.start_replicas: expected 0, the quorum (1) or all 1 replicas, found 3",
        "workload.colour: expected no such field",
        "pools.0.credential: expected a credential for modal",
        "pools.1.unknown: expected no such field",
        "notify.0: expected a webhook",
    ):
        assert message in at_document
    assert form["dylu"].value() == "on"
    assert "nothing: 1" in form["document"].value()


@matrix(
    ("text", "message"),
    [
        ("", "found an empty text"),
        ("{", "not valid JSON"),
        ("[a", "not valid TOML"),
        ("- 1", "expected a document with names and values"),
        ("a: &x [1]", "expected no anchor"),
        ("a: " + "x" * 64_000, "expected at most 64,000"),
    ],
    fast=2,
)
def test_a_text_that_is_no_document_keeps_the_form(
    client: Client, operator_user: Any, text: str, message: str
) -> None:
    sent = filled(client) | {"document": text, "paste": "1", "name": "Kept"}
    form = client.post("/runs/new", sent).context["form"]
    assert form["name"].value() == "Kept"
    assert message in form.all_errors["document"][0]


def test_too_many_evaluations_are_refused(client: Client, operator_user: Any) -> None:
    plans = [{"name": f"e{number}"} for number in range(9)]
    errors = paste(client, json.dumps({"pools": [{"count": 1}], "evaluations": plans})).all_errors
    assert "expected at most 8, found 9" in str(errors)


@matrix(
    "document",
    [
        {"pools": 1, "settings": 1, "workload": [], "fork": 3, "notify": {}},
        {"pools": [[]], "workload": {"kind": {}}, "store_credential": [], "name": {}},
        {"pools": [{"count": True, "options": [1], "timeout_s": {}}], "notify": [{}]},
        {"settings": {"inner_lr": [1], "start_replicas": []}, "trackers": [1], "fork": {"run": 1}},
    ],
    fast=1,
)
def test_no_document_breaks_the_page(client: Client, operator_user: Any, document: Any) -> None:
    assert paste(client, json.dumps(document)).all_errors


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
    | st.sampled_from(["modal", "stdlib", "shards", "huggingface", "custom", "byte_gpt", "1"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


def some_of(names: Iterable[str], **parts: Any) -> Any:
    values = dict.fromkeys(names, JSON_VALUES) | {
        name: JSON_VALUES | part for name, part in parts.items()
    }
    return st.fixed_dictionaries({}, optional=values)


DOCUMENTS = some_of(
    pasted._KNOWN,
    settings=some_of(spec.name for spec in setting_fields()),
    workload=some_of(
        field.name for each in WORKLOADS.values() for field in dataclasses.fields(each)
    ).flatmap(lambda rest: st.sampled_from([*WORKLOADS]).map(lambda kind: rest | {"kind": kind})),
    pools=st.lists(JSON_VALUES | some_of(PoolDraft.__dataclass_fields__), max_size=3),
    evaluations=st.lists(JSON_VALUES | some_of(PlanDraft(name="").to_dict()), max_size=2),
    fork=some_of(["run", "round", "outer"]),
)


@pytest.mark.slow
@hypothesis.settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(document=DOCUMENTS)
def test_any_document_fills_the_form_or_is_refused_at_its_fields(
    operator_user: Any, document: Any
) -> None:
    choices = PoolChoices.load()
    defaults = pasted.posted(RunForm(initial=initial_from(pasted.OMITTED), choices=choices))
    values, problems = pasted.fill(document, defaults)
    form = RunForm(values, choices=choices)
    assert (form.draft() is not None) == (not form.all_errors)
    assert all(problem.message.startswith("expected ") for problem in problems)


def test_a_name_that_a_run_has_gets_a_number(client: Client, run: Run) -> None:
    Run.objects.update(name="Local demo")
    assert filled(client)["name"] == "Local demo 2"
    Run.objects.update(name="First (copy)")
    form = client.get(f"/runs/new?clone={run.pk}").context["form"]
    assert form["name"].value() == "First (copy 2)"


def estimate(client: Client, run: Run, **changed: str) -> Any:
    form = client.get(f"/runs/new?clone={run.pk}").context["form"]
    fields = [*form, *(field for pool in form.pools for field in pool)]
    sent = {f.html_name: v for f in fields if (v := f.value()) is not None and v is not False}
    return client.post("/runs/estimate.json", sent | changed).json()


def test_a_clone_lists_what_it_changes(client: Client, run: Run) -> None:
    assert estimate(client, run)["changes"] == []
    answer = estimate(client, run, **{"inner_lr": "0.00123", "pools.0.count": "3"})
    assert [(c["input"], c["before"], c["after"]) for c in answer["changes"]] == [
        ("inner_lr", "0.0004", "0.00123"),
        ("pools.0.count", "2", "3"),
    ]
    words = shlex.split(answer["command"])
    assert words[:3] == ["archipelago", "clone", str(run.pk)]
    assert "settings.inner_lr=0.00123" in words and "pools.0.count=3" in words


def test_a_clone_changes_trackers_and_webhooks_by_name(client: Client, run: Run) -> None:
    board = tracker("board")
    desk, _ = (
        Webhook.objects.create(name=name, url="https://a.example", created_at=timezone.now())
        for name in ("desk", "other")
    )
    answer = estimate(client, run, trackers=str(board.pk), notify=str(desk.pk))
    assert [(c["input"], c["label"], c["before"], c["after"]) for c in answer["changes"]] == [
        ("notify", "Webhooks for alerts", "all", "desk"),
        ("trackers", "Experiment trackers", "none", "board"),
    ]
    words = shlex.split(answer["command"])
    assert 'trackers=["board"]' in words and 'notify=["desk"]' in words


def test_trackers_are_chosen_in_the_form_a_clone_and_a_document(
    client: Client, operator_user: Any
) -> None:
    board, off = tracker("board"), tracker("off", enabled=False)
    page = client.get("/runs/new").content.decode()
    assert "board" in page and f'name="trackers" value="{off.pk}"' not in page
    response = client.post("/runs/new", filled(client) | {"trackers": str(board.pk)})
    assert response.status_code == 302
    run = Run.objects.get()
    assert list(run.mirrors.values_list("tracker", flat=True)) == [board.pk]
    clone = client.get(f"/runs/new?clone={run.pk}").context["form"]
    assert clone["trackers"].value() == [str(board.pk)]
    Run.objects.all().delete()
    form = paste(client, '{"pools": [{}], "trackers": ["board", "off"]}')
    assert "trackers.1: expected a tracker (board), found 'off'" in form.all_errors["document"][0]
    form = paste(client, '{"name": "x", "pools": [{}], "trackers": ["board"]}')
    assert form["trackers"].value() == [str(board.pk)] and form.all_errors == {}


def test_tags_are_entered_in_the_form_a_clone_and_a_document(
    client: Client, operator_user: Any
) -> None:
    response = client.post("/runs/new", filled(client) | {"tags": " paper  small paper"})
    assert response.status_code == 302
    run = Run.objects.get()
    assert run.tags == ["paper", "small"]
    form = client.get(f"/runs/new?clone={run.pk}").context["form"]
    assert form["tags"].value() == "paper small"
    [change] = estimate(client, run, tags="paper big")["changes"]
    assert change == {
        "input": "tags",
        "label": "Tags",
        "before": "paper, small",
        "after": "paper, big",
    }
    Run.objects.all().delete()
    form = paste(client, '{"name": "x", "pools": [{}], "tags": ["paper"]}')
    assert form.draft().tags == ("paper",)
    form = paste(client, '{"name": "x", "pools": [{}], "tags": ["a:b"]}')
    assert form.all_errors["tags"][0].startswith(
        "expected tags of 1 to 40 characters without space"
    )


@pytest.mark.parametrize("tags", ['["a b"]', '[["x"]]', "[true]", '[""]', "[1]"])
def test_a_tag_of_a_document_is_one_word(client: Client, operator_user: Any, tags: str) -> None:
    form = paste(client, f'{{"name": "x", "pools": [{{}}], "tags": {tags}}}')
    [error] = [text for texts in form.all_errors.values() for text in texts if "tags" in text]
    assert error.startswith("tags: expected tags of 1 to 40 characters without space")


@pytest.mark.parametrize("tags", ["a\0b", " ".join(map(str, range(300_000))), "a:b"])
def test_wrong_tags_are_an_error_of_their_field(
    client: Client, operator_user: Any, tags: str
) -> None:
    response = client.post("/runs/new", filled(client) | {"tags": tags})
    assert response.status_code == 422 and not Run.objects.exists()
    assert response.context["form"].errors["tags"]


def test_the_budget_of_a_tag_is_shown_and_refuses_the_launch(client: Client, run: Run) -> None:
    Run.objects.update(tags=["paper"])
    save_budget(scope="tag", name="paper", period="month", amount_usd=0.0, actor=run.owner)
    assert "no launches through" in estimate(client, run)["budgets"]
    assert estimate(client, run, tags="other")["budgets"].strip() == ""
    assert "no launches through" in client.get(f"/runs/new?clone={run.pk}").content.decode()
    response = client.post("/runs/new", filled(client) | {"tags": "paper"})
    page = response.content.decode()
    assert response.status_code == 422
    assert "<h2>Nothing was launched</h2>" in page
    assert "<li>The budget of tag paper is spent: $0.00 of $0.00 a month" in page


def test_a_clone_shows_its_changes_without_javascript(client: Client, run: Run) -> None:
    page = client.get(f"/runs/new?clone={run.pk}").content.decode()
    assert "Nothing changed yet" in page
    assert 'id="s-training"' in page and 'id="s-training" open' not in page


def test_other_forms_have_no_changes(client: Client, operator_user: Any) -> None:
    answer = client.post("/runs/estimate.json", filled(client)).json()
    assert answer["changes"] is None
    assert answer["command"].startswith("archipelago submit - <<'JSON'\n{")


def test_a_sweep_of_the_form_creates_all_runs(client: Client, operator_user: Any) -> None:
    sweep = {"sweep": "inner_lr = 1e-3, 2e-3\nworkload.size = demo, micro", "sweep_parallel": "1"}
    answer = client.post("/runs/estimate.json", filled(client) | sweep).json()
    assert (answer["sweep"]["runs"], answer["sweep"]["fields"]) == (4, "Inner learning rate, Size")
    assert "--parallel 1" in answer["command"]
    response = client.post("/runs/new", filled(client) | sweep)
    row = Sweep.objects.get()
    assert response["Location"] == f"/sweeps/{row.pk}"
    assert row.runs.count() == 4
    page = client.get(f"/sweeps/{row.pk}").content.decode()
    assert "Waiting for its turn" in page and "Inner learning rate" in page
    assert client.get(f"/sweeps/{row.pk}?part=1").status_code == 200
    assert str(row.pk) in client.get("/sweeps").content.decode()


@matrix(
    ("change", "field", "message"),
    [
        ({"sweep": "inner_lr = 1e-3"}, "sweep", "expected values that make 2 to 100 runs"),
        ({"sweep": "inner_lr = 1,2", "sweep_parallel": "101"}, "sweep_parallel", "100"),
        ({"sweep": "inner_lr = 1,2", "sweep_budget_usd": "-1"}, "sweep_budget_usd", "0"),
        ({"sweep": "total_rounds = 1, 16"}, "sweep", "with total_rounds=1: warmup_steps"),
    ],
    fast=1,
)
def test_errors_of_a_sweep_are_at_its_fields(
    client: Client, operator_user: Any, change: dict[str, str], field: str, message: str
) -> None:
    for button in ({}, {"dry_run": "1"}):
        response = client.post("/runs/new", filled(client) | change | button)
        assert response.status_code == 422
        assert list(response.context["form"].all_errors) == [field]
        assert message in response.context["form"].all_errors[field][0]
    assert not Run.objects.exists()
