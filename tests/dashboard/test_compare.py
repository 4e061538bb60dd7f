"""The comparison page: which runs, which baseline, what is said of those that are not there."""

from __future__ import annotations

import csv
import io
import uuid
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from runs.models import Run
from runs.queries.comparison import MOST
from tests.browser import seed
from tests.dashboard.people import client_for, some

pytestmark = pytest.mark.django_db


def ids(*runs: Run) -> str:
    return ",".join(str(run.pk) for run in runs)


def names(answer: Any) -> list[str]:
    return [row["run"].name for row in answer.context["rows"]]


def test_empty(client: Client, olga: Any) -> None:
    answer = client.get("/compare")
    assert answer.status_code == 200
    assert "Nothing to compare yet" in answer.content.decode()
    assert client.get("/compare.json").json() == {"runs": [], "curves": []}


def test_one_is_its_own_baseline(client: Client, olga: Any) -> None:
    (run,) = some(olga, 1)
    page = client.get("/compare", {"ids": ids(run)}).content.decode()
    assert "One run is its own baseline" in page
    assert "There is only one run." in page


def test_the_first_is_the_baseline_until_another_is_pinned(client: Client, olga: Any) -> None:
    one, two, three = some(olga, 3)
    assert names(client.get("/compare", {"ids": ids(one, two, three)})) == ["r0", "r1", "r2"]
    pinned = client.get("/compare", {"ids": ids(one, two, three), "base": str(three.pk)})
    assert names(pinned) == ["r2", "r0", "r1"]
    assert "Differences are to the baseline, r2" in pinned.content.decode()
    foreign = client.get("/compare", {"ids": ids(one), "base": str(two.pk)})
    assert names(foreign) == ["r0"]


def test_twice_is_once(client: Client, olga: Any) -> None:
    (run,) = some(olga, 1)
    assert names(client.get("/compare", {"ids": ids(run, run) + f",{str(run.pk).upper()}"})) == [
        "r0"
    ]


@pytest.mark.parametrize("unknown", [str(uuid.uuid4()), "nonsense", "<script>", "\x00"])
def test_ids_of_no_run_are_named_and_the_rest_is_shown(
    client: Client, olga: Any, unknown: str
) -> None:
    (run,) = some(olga, 1)
    answer = client.get("/compare", {"ids": f"{ids(run)},{unknown}"})
    assert answer.status_code == 200
    assert names(answer) == ["r0"]
    assert "of no run you can see" in answer.content.decode()
    assert "<script>" not in answer.content.decode()
    alone = client.get("/compare", {"ids": unknown})
    assert alone.status_code == 404
    assert "Nothing to compare" in alone.content.decode()


def test_too_many(client: Client, olga: Any) -> None:
    runs = some(olga, MOST + 2, committed=0)
    answer = client.get("/compare", {"ids": ids(*runs)})
    assert answer.status_code == 422
    assert len(answer.context["rows"]) == MOST
    page = answer.content.decode()
    assert f"Expected at most {MOST} runs, found {MOST + 2}: the last 2 are left out" in page
    pinned = client.get("/compare", {"ids": ids(*runs), "base": str(runs[-1].pk)})
    assert names(pinned)[0] == runs[-1].name


def test_everybody_with_a_role_compares_any_runs(olga: Any) -> None:
    (run,) = some(olga, 1)
    for kind in ("viewer", "owner", "stranger", "admin"):
        answer = client_for(kind, olga).get("/compare", {"ids": ids(run)})
        assert names(answer) == ["r0"], kind


@pytest.mark.parametrize("path", ["/compare", "/compare.json", "/compare.csv"])
def test_somebody_without_a_role_sees_nothing(olga: Any, path: str) -> None:
    (run,) = some(olga, 1)
    client = Client()
    client.force_login(seed.user("nobody", ""))
    answer = client.get(path, {"ids": ids(run)})
    assert answer.status_code == 403
    assert b"r0" not in answer.content


def test_the_number_of_queries_does_not_grow(client: Client, olga: Any) -> None:
    counts = []
    for many in (2, 8):
        runs = some(olga, many)
        for path in ("/compare", "/compare.json", "/compare.csv"):
            with CaptureQueriesContext(connection) as queries:
                client.get(path, {"ids": ids(*runs)})
            counts.append(len(queries))
    assert counts[:3] == counts[3:]


def test_csv_neutralises_the_names_of_columns(client: Client, olga: Any) -> None:
    """An imported run can have any names in its workload."""
    one, two = (seed.run(olga, committed=1, replicas=1) for _ in range(2))
    Run.objects.filter(pk=one.pk).update(workload={"kind": "byte_gpt", '=HYPERLINK("x")': 1})
    answer = client.get("/compare.csv", {"ids": ids(one, two)})
    columns, *_ = csv.reader(io.StringIO(answer.content.decode()))
    assert not [name for name in columns if name.startswith(("=", "+", "-", "@"))]
    assert any("HYPERLINK" in name for name in columns)


def test_csv_has_measures_differences_and_settings_that_differ(client: Client, olga: Any) -> None:
    one = seed.run(olga, name="=cmd()", committed=2, replicas=1, sync_every=40)
    two = seed.run(olga, name="two", committed=2, replicas=1, sync_every=80)
    Run.objects.filter(pk=one.pk).update(eval_loss=3.0)
    Run.objects.filter(pk=two.pk).update(eval_loss=2.5)
    answer = client.get("/compare.csv", {"ids": ids(one, two)})
    assert answer["Content-Type"] == "text/csv; charset=utf-8"
    first, second = csv.DictReader(io.StringIO(answer.content.decode()))
    assert first["name"] == "'=cmd()"
    assert (first["eval_loss"], first["eval_loss_change"]) == ("3.0", "")
    assert (second["eval_loss"], second["eval_loss_change"]) == ("2.5", "-0.5")
    assert (first["settings.sync_every"], second["settings.sync_every"]) == ("40", "80")
    assert first["cost_usd"] == ""  # its price is not known
    assert "settings.codec" not in first


def test_curves_come_as_columns(client: Client, olga: Any) -> None:
    (run,) = some(olga, 1, committed=3)
    found = {
        c["series"]: c for c in client.get("/compare.json", {"ids": ids(run)}).json()["curves"]
    }
    assert set(found) == {"eval_loss", "loss"}
    for curve in found.values():
        assert curve["run"] == str(run.pk)
        assert len(curve["tokens"]) == len(curve["wall"]) == len(curve["value"])
        assert curve["money"] is None
