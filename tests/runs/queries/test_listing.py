"""The runs list: pages in any order, facets and sparklines."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from runs.models import ReplicaPool, Run
from runs.queries import listing
from runs.queries.listing import SORTS, Order
from runs.queries.search import parse, toggled, without
from tests.browser import seed
from tests.module_rows import Unblock

pytestmark = pytest.mark.django_db


def bare(number: int, **fields: Any) -> Run:
    now = timezone.now()
    made = Run.objects.create(
        **{
            "name": f"run {number}",
            "owner": seed.user("olga", "operator"),
            "state": "running",
            "state_since": now,
            "created_at": now - datetime.timedelta(seconds=number),
            "rendezvous": f"file:///{number}",
            "workload": {},
            "submit_key": str(number),
            "group_settings": seed.group_settings(),
        }
        | fields
    )
    ReplicaPool.objects.create(run=made, backend="modal" if number % 2 else "local", count=1)
    return made


@pytest.fixture(scope="module")
def runs(module_rows: Unblock) -> None:
    """Equal and unknown values, and a name with the separator of the cursor."""
    loss = [3.0, None, 2.5, 2.5, 0.1, None, 7.25, 2.5]
    with module_rows():
        now = timezone.now()
        for number, value in enumerate(loss):
            bare(
                number,
                eval_loss=value,
                train_loss=value,
                tokens=number // 2,
                cost_usd=number % 3 / 10,
                committed_rounds=number % 2,
                name=f"a_b {number % 3}",
                started_at=None if value is None else now - datetime.timedelta(hours=number),
            )


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("falling", [True, False])
@pytest.mark.parametrize("name", SORTS)
@pytest.mark.parametrize("limit", [1, 3, 8])
def test_pages_contain_every_run_once_in_order(name: str, falling: bool, limit: int) -> None:
    order = Order(name=name, falling=falling)
    seen: list[Run] = []
    after = ""
    for _ in range(20):
        result, after = listing.page(Run.objects.all(), order, after=after, limit=limit)
        seen += result
        if not after:
            break
    assert len(seen) == len({run.pk for run in seen}) == 8
    values = [getattr(run, order.column) for run in seen]
    known = [value for value in values if value is not None]
    assert known == sorted(known, reverse=falling)
    assert values == known + [None] * (8 - len(known))


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("name", SORTS)
@pytest.mark.parametrize(
    "after", ["nonsense", "nan_" + "0" * 32, "1e999_" + "0" * 32, "_x", "9" * 30 + "_" + "0" * 32]
)
def test_a_broken_cursor_is_the_first_page(name: str, after: str) -> None:
    order = Order(name=name)
    result, _ = listing.page(Run.objects.all(), order, after=after, limit=8)
    assert len(result) == 8 or (name == "name" and listing.is_place(order, after))


def test_an_unknown_order_is_newest_first() -> None:
    assert str(Order.of("")) == str(Order.of("-nothing")) == "-created"
    assert str(Order.of("loss")) == "loss"


@pytest.mark.usefixtures("runs")
def test_facets_count_runs_that_match_the_other_terms() -> None:
    Run.objects.filter(name="a_b 0").update(state="failed", tags=["x", "y"])
    result = listing.facets(parse("state:failed")).choices
    assert {c.value: (c.count, c.chosen) for c in result["state"]} == {
        "running": (5, False),
        "failed": (3, True),
    }
    assert {c.value: c.count for c in result["backend"]} == {"modal": 1, "local": 2}
    assert {c.value: c.count for c in result["tag"]} == {"x": 3, "y": 3}
    assert {c.value: c.count for c in result["owner"]} == {"olga": 3}
    chosen = {c.value: c for c in listing.facets(parse("state:queued")).choices["state"]}["queued"]
    assert (chosen.count, chosen.chosen) == (0, True)


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("query", "most"), [("", 2), ("state:running", 3), ("state:running tag:x owner:olga", 5)]
)
def test_number_of_facet_queries_does_not_grow(query: str, most: int) -> None:
    terms = parse(query)
    with CaptureQueriesContext(connection) as few:
        listing.facets(terms)
    for number in range(20, 30):
        bare(number, tags=["z"])
    with CaptureQueriesContext(connection) as many:
        listing.facets(terms)
    assert len(few) == len(many) == most


@pytest.mark.usefixtures("runs")
def test_facets_count_the_newest_runs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert listing.facets(()).whole
    total = Run.objects.filter(archived_at=None).count()
    monkeypatch.setattr(listing, "COUNTED", total)
    assert listing.facets(()).whole
    monkeypatch.setattr(listing, "COUNTED", 2)
    result = listing.facets(())
    assert not result.whole
    assert sum(c.count for c in result.choices["state"]) == 2
    newest = Run.objects.filter(archived_at=None).order_by("-created_at", "-id")[:2]
    tags = {tag for run in newest for tag in run.tags}
    assert {c.value for c in result.choices["tag"]} == tags


@pytest.mark.parametrize(
    ("query", "field", "value", "after"),
    [
        ("", "state", "running", "state:running"),
        ("state:running loss<3", "state", "failed", "loss<3 state:running,failed"),
        ("state:running,failed", "state", "running", "state:failed"),
        ("x state:running", "state", "running", "x"),
        ("-tag:a", "tag", "b", "-tag:a tag:b"),
        ("", "owner", "two words", 'owner:"two words"'),
    ],
)
def test_facet_toggles_a_value(query: str, field: str, value: str, after: str) -> None:
    assert toggled(parse(query), field, value) == after
    parse(after)


def test_term_is_removed() -> None:
    terms = parse('loss<3 name:"a b" -x')
    assert without(terms, terms[1]) == "loss<3 -x"


def test_curves_of_the_rows() -> None:
    operator_user = seed.user("olga", "operator")
    long = seed.run(operator_user, committed=200, replicas=1, total_rounds=400)
    none = seed.run(operator_user, committed=0, replicas=1)
    with CaptureQueriesContext(connection) as queries:
        result = listing.sparks([long, none])
    assert len(queries) == 1
    assert none.pk not in result
    values = result[long.pk]
    assert 20 <= len(values) <= listing.SPARK_POINTS + 1
    assert values[0] == pytest.approx(seed.curve(0) + 0.05)
    assert values[-1] == pytest.approx(seed.curve(200 * 40) + 0.05)
