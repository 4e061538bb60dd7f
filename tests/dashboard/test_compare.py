"""The comparison page: selection, baseline, and unknown ids."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from dashboard.templatetags.comparing import change
from runs.models import Run
from runs.queries.comparison import MOST, Cell, Measure
from tests.browser import seed
from tests.browser.seed_prices import unpriced
from tests.dashboard.page_harness import client_for, make_runs

pytestmark = pytest.mark.django_db


def ids(*runs: Run) -> str:
    return ",".join(str(run.pk) for run in runs)


def names(response: Any) -> list[str]:
    return [row["run"].name for row in response.context["rows"]]


def test_empty(client: Client, operator_user: Any) -> None:
    response = client.get("/compare")
    assert response.status_code == 200
    assert "Nothing to compare yet" in response.content.decode()
    assert client.get("/compare.json").json() == {"runs": [], "curves": []}


def test_a_single_run_is_its_own_baseline(client: Client, operator_user: Any) -> None:
    (run,) = make_runs(operator_user, 1)
    page = client.get("/compare", {"ids": ids(run)}).content.decode()
    assert "A comparison needs two runs" in page
    assert "There is only one run." in page and "It is still running" in page


@pytest.mark.parametrize(
    ("share", "text"), [(0.0614, "+1.500 (+6.1%)"), (9.99, "+1.500 (+999%)"), (14030.0, "+1.500")]
)
def test_a_change_of_many_times_the_value_has_no_percentage(share: float, text: str) -> None:
    measure = Measure(name="cost_usd", label="Cost", unit="loss")
    assert change(measure, Cell(value=2.0, change=1.5, share=share)) == text


def test_the_first_run_is_the_default_baseline(client: Client, operator_user: Any) -> None:
    one, two, three = make_runs(operator_user, 3)
    assert names(client.get("/compare", {"ids": ids(one, two, three)})) == ["r0", "r1", "r2"]
    pinned = client.get("/compare", {"ids": ids(one, two, three), "base": str(three.pk)})
    assert names(pinned) == ["r2", "r0", "r1"]
    assert "Differences from the baseline, r2" in pinned.content.decode()
    foreign = client.get("/compare", {"ids": ids(one), "base": str(two.pk)})
    assert names(foreign) == ["r0"]


def test_repeated_ids_are_merged(client: Client, operator_user: Any) -> None:
    (run,) = make_runs(operator_user, 1)
    assert names(client.get("/compare", {"ids": ids(run, run) + f",{str(run.pk).upper()}"})) == [
        "r0"
    ]


@pytest.mark.parametrize(
    "unknown", ["00000000-0000-4000-8000-000000000001", "nonsense", "<script>", "\x00"]
)
def test_unknown_ids_are_reported_and_the_rest_is_shown(
    client: Client, operator_user: Any, unknown: str
) -> None:
    (run,) = make_runs(operator_user, 1)
    response = client.get("/compare", {"ids": f"{ids(run)},{unknown}"})
    assert response.status_code == 200
    assert names(response) == ["r0"]
    assert "no run you can see" in response.content.decode()
    assert "<script>" not in response.content.decode()
    alone = client.get("/compare", {"ids": unknown})
    assert alone.status_code == 404
    assert "Nothing to compare" in alone.content.decode()


def test_too_many(client: Client, operator_user: Any) -> None:
    runs = make_runs(operator_user, MOST + 2, committed=0)
    response = client.get("/compare", {"ids": ids(*runs)})
    assert response.status_code == 422
    assert len(response.context["rows"]) == MOST
    page = response.content.decode()
    assert f"Expected at most {MOST} runs, found {MOST + 2}: the last 2 are not shown" in page
    pinned = client.get("/compare", {"ids": ids(*runs), "base": str(runs[-1].pk)})
    assert names(pinned)[0] == runs[-1].name


def test_a_part_has_the_tables_alone_and_only_working_runs_are_followed(
    client: Client, operator_user: Any
) -> None:
    running = seed.run(operator_user, name="Going", committed=2)
    ended = seed.run(operator_user, name="Done", state="succeeded", committed=2)
    page = client.get("/compare", {"ids": f"{running.pk}"}).content.decode()
    assert "data-conn" in page and "<noscript>" in page
    part = client.get("/compare", {"ids": f"{running.pk}", "part": "1"}).content.decode()
    assert "Going" in part and "<html" not in part
    assert "data-conn" not in client.get("/compare", {"ids": ended.pk}).content.decode()


def test_every_role_can_compare_runs(operator_user: Any) -> None:
    (run,) = make_runs(operator_user, 1)
    for kind in ("viewer", "owner", "stranger", "admin"):
        response = client_for(kind, operator_user).get("/compare", {"ids": ids(run)})
        assert names(response) == ["r0"], kind


@pytest.mark.parametrize("path", ["/compare", "/compare.json", "/compare.csv"])
def test_users_without_a_role_see_nothing(operator_user: Any, path: str) -> None:
    (run,) = make_runs(operator_user, 1)
    client = Client()
    client.force_login(seed.user("no-role", ""))
    response = client.get(path, {"ids": ids(run)})
    assert response.status_code == 403
    assert b"r0" not in response.content


def test_the_number_of_queries_is_constant(client: Client, operator_user: Any) -> None:
    counts = []
    for many in (2, 8):
        runs = make_runs(operator_user, many)
        for path in ("/compare", "/compare.json", "/compare.csv"):
            with CaptureQueriesContext(connection) as queries:
                client.get(path, {"ids": ids(*runs)})
            counts.append(len(queries))
    assert counts[:3] == counts[3:]


def test_csv_escapes_column_names(client: Client, operator_user: Any) -> None:
    """An imported run can have arbitrary names in its workload."""
    one, two = (seed.run(operator_user, committed=1, replicas=1) for _ in range(2))
    Run.objects.filter(pk=one.pk).update(workload={"kind": "byte_gpt", '=HYPERLINK("x")': 1})
    response = client.get("/compare.csv", {"ids": ids(one, two)})
    columns, *_ = csv.reader(io.StringIO(response.content.decode()))
    assert not [name for name in columns if name.startswith(("=", "+", "-", "@"))]
    assert any("HYPERLINK" in name for name in columns)


def test_csv_has_measures_changes_and_differing_settings(
    client: Client, operator_user: Any
) -> None:
    one = unpriced(seed.run(operator_user, name="=cmd()", committed=2, replicas=1, sync_every=40))
    two = seed.run(operator_user, name="two", committed=2, replicas=1, sync_every=80)
    Run.objects.filter(pk=one.pk).update(eval_loss=3.0)
    Run.objects.filter(pk=two.pk).update(eval_loss=2.5)
    response = client.get("/compare.csv", {"ids": ids(one, two)})
    assert response["Content-Type"] == "text/csv; charset=utf-8"
    first, second = csv.DictReader(io.StringIO(response.content.decode()))
    assert first["name"] == "'=cmd()"
    assert (first["eval_loss"], first["eval_loss_change"]) == ("3.0", "")
    assert (second["eval_loss"], second["eval_loss_change"]) == ("2.5", "-0.5")
    assert (first["settings.sync_every"], second["settings.sync_every"]) == ("40", "80")
    assert first["cost_usd"] == ""  # price not known
    assert "settings.codec" not in first


def test_curves_are_sent_as_columns(client: Client, operator_user: Any) -> None:
    (run,) = make_runs(operator_user, 1, committed=3)
    unpriced(run)
    for asked, series in (({}, "eval_loss"), ({"series": "norm"}, "norm")):
        answer = client.get("/compare.json", {"ids": ids(run), **asked}).json()
        (curve,) = answer["curves"]
        assert (curve["run"], curve["series"]) == (str(run.pk), series)
        assert len(curve["tokens"]) == len(curve["wall"]) == len(curve["value"]) > 2
        assert curve["money"] is None
        metric = {"metric": asked["series"]} if asked else {}
        assert client.get("/api/compare/curves", {"id": str(run.pk), **metric}).json() == answer
    refused = client.get("/compare.json", {"ids": ids(run), "series": "phase_wait"})
    assert refused.status_code == 422
    assert "found 'phase_wait'" in refused.json()["error"]
    wrong = client.get("/api/compare/curves", {"id": str(run.pk), "metric": "phase_wait"})
    assert wrong.status_code == 422
