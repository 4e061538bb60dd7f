"""What runs cost: the terms ``rate`` and ``cost``, the header of a run, tabs and totals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from runs.models import Replica, ReplicaAttempt, ReplicaPool, Run
from runs.queries import search, selectors, totals
from runs.queries.search import parse
from tests.browser import seed
from tests.module_rows import Unblock

pytestmark = pytest.mark.django_db


@pytest.fixture
def operator_user(db: None, seeded: Any) -> Any:
    return copy.deepcopy(seeded)


@pytest.fixture(scope="module", autouse=True)
def seeded(module_rows: Unblock) -> Any:
    """The owner of the first three runs."""
    with module_rows():
        olga, oscar = seed.user("olga", "operator"), seed.user("oscar", "operator")
        make(olga, "alpha", (5.0, "waits"), (7.0, "ended"), cost_usd=3.0)
        make(olga, "beta", (4.0, "runs"), (4.0, "runs"), (9.0, "ended"), cost_usd=9.0)
        make(olga, "gamma", state="failed", cost_usd=1.0)
        make(oscar, "zeta", (6.0, "runs"), (6.5, "runs"), (None, "runs"), cost_usd=200.0)
        make(oscar, "eta", (None, "runs"))
        long_ago = {"archived_at": timezone.now(), "cost_usd": 70.0}
        make(oscar, "old", (50.0, "runs"), state="failed", **long_ago)
        return olga


def make(owner: Any, name: str, *prices: tuple[float | None, str], **fields: Any) -> Run:
    """A run with a job for each price an hour, that runs, waits for a machine, or ended."""
    now = timezone.now()
    run = Run.objects.create(
        **{
            "name": name,
            "owner": owner,
            "state": "running",
            "state_since": now,
            "created_at": now,
            "rendezvous": f"file:///{name}",
            "workload": {},
            "group_settings": seed.group_settings(),
            "submit_key": name,
        }
        | fields
    )
    price = None if any(price is None for price, _ in prices) else 1.0
    pool = ReplicaPool.objects.create(run=run, backend="modal", count=2, price_usd_h=price)
    for number, (price, state) in enumerate(prices):
        replica = Replica.objects.create(run=run, pool=pool, number=number, state_since=now)
        ReplicaAttempt.objects.create(
            replica=replica,
            number=1,
            launch_key=f"{name}-{number}",
            created_at=now,
            launched_at=now,
            started_at=None if state == "waits" else now,
            ended_at=now if state == "ended" else None,
            price_usd_h=price,
        )
    return run


def header(name: str) -> dict[str, Any]:
    return selectors.run_header(Run.objects.get(name=name))


@pytest.mark.parametrize(
    ("name", "usd_h", "is_known"),
    [
        ("alpha", 0.0, True),
        ("beta", 8.0, True),
        ("gamma", 0.0, True),
        ("zeta", 12.5, False),
        ("eta", 0.0, False),
    ],
)
def test_the_rate_is_that_of_running_jobs(name: str, usd_h: float, is_known: bool) -> None:
    row = header(name)
    assert (row["usd_h"], row["usd_h_known"]) == (usd_h, is_known)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rate>10", "zeta"),
        ("rate>=8", "beta zeta"),
        ("rate>=0", "alpha beta eta gamma zeta"),
        ("rate>0", "beta zeta"),
        ("rate<12", "alpha beta gamma"),
        ("rate<=8", "alpha beta gamma"),
        ("rate<8", "alpha gamma"),
        ("rate<0", ""),
        ("rate=0", "alpha gamma"),
        ("rate:8", "beta"),
        ("-rate>10 state:running", "alpha beta eta"),
        ("cost>100", "zeta"),  # of which a part is unknown
        ("cost>=200", "zeta"),
        ("cost<1k", "alpha beta gamma"),
        ("cost<=3", "alpha gamma"),
        ("cost=0", ""),
    ],
)
def test_runs_are_found_by_rate_and_cost(text: str, expected: str, operator_user: Any) -> None:
    runs = search.matching(Run.objects.all(), parse(text), user=operator_user)
    assert sorted(runs.values_list("name", flat=True)) == expected.split()


@pytest.mark.parametrize(
    ("text", "count", "cost", "rate"),
    [
        ("", 5, (213.0, False), (20.5, False)),
        ("is:mine", 3, (13.0, True), (8.0, True)),
        ("state:failed", 1, (1.0, True), (0.0, True)),
        ("is:archived", 1, (70.0, True), (50.0, True)),
        ("name:eta", 3, (209.0, False), (20.5, False)),
        ("name:nothing", 0, (0.0, True), (0.0, True)),
    ],
)
def test_totals_are_those_of_the_matching_runs(
    text: str, count: int, cost: tuple[float, bool], rate: tuple[float, bool], operator_user: Any
) -> None:
    total = totals.totals(parse(text), user=operator_user)
    assert total.runs == count
    assert (total.cost_usd, total.cost_known) == cost
    assert (total.usd_h, total.usd_h_known) == rate


@pytest.mark.parametrize("text", ["", "is:active", "IS:Mine state:failed"])
def test_tabs_count_the_runs_that_match_the_other_terms(text: str, operator_user: Any) -> None:
    total = totals.totals(parse(text), user=operator_user)
    assert total.tabs == {"active": 4, "mine": 3, "failed": 1, "all": 5}
    some = totals.totals(parse(f"{text} rate>1"), user=operator_user)
    assert some.tabs == {"active": 2, "mine": 1, "failed": 0, "all": 2}


@pytest.mark.parametrize(
    ("text", "tab", "query", "selected"),
    [
        ("", "active", "is:active", ["all"]),
        ("rate>3 is:active", "failed", "rate>3 state:failed", ["active"]),
        ("is:mine rate>3", "all", "rate>3", ["mine"]),
        ("state:running", "mine", "state:running is:mine", ["all"]),
    ],
)
def test_a_tab_replaces_only_the_term_of_a_tab(
    text: str, tab: str, query: str, selected: list[str]
) -> None:
    assert totals.query_of(tab, parse(text)) == query
    assert totals.tabs_of(parse(text)) == selected


def test_the_number_of_queries_is_constant(operator_user: Any) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            totals.totals(parse("cost>=0"), user=operator_user)
        return len(captured)

    before = queries()
    for number in range(5):
        make(operator_user, f"more {number}", (1.0, "runs"), (None, "runs"))
    assert queries() == before == 4
