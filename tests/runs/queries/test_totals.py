"""What runs cost: the terms ``rate`` and ``cost``, the header of a run, tabs and totals."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.backends.utils import CursorWrapper
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from archipelago.rows import RunTotals
from runs.models import Alert, Replica, ReplicaAttempt, ReplicaPool, RetainedSpend, Run
from runs.queries import budgets, search, selectors, spend, totals
from runs.queries.attempt_costs import Period
from runs.queries.live_jobs import JobFilter
from runs.queries.search import matching, parse
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


def totals_of(text: str, user: Any) -> RunTotals:
    runs = matching(Run.objects.all(), parse(text), user=user)
    return totals.totals(runs, now=timezone.now())


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
    total = totals_of(text, operator_user)
    assert total.runs == count
    assert (total.cost_usd, total.cost_known) == cost
    assert (total.usd_h, total.usd_h_known) == rate


@pytest.mark.parametrize("text", ["", "is:active", "IS:Mine state:failed"])
def test_tabs_count_the_runs_that_match_the_other_terms(text: str, operator_user: Any) -> None:
    every = totals.tab_counts(parse(text), user=operator_user)
    assert every == {"active": 4, "mine": 3, "failed": 1, "all": 5}
    some = totals.tab_counts(parse(f"{text} rate>1"), user=operator_user)
    assert some == {"active": 2, "mine": 1, "failed": 0, "all": 2}


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


def test_gpus_are_those_of_running_jobs(operator_user: Any) -> None:
    assert (totals_of("", operator_user).gpus, totals_of("", operator_user).gpus_known) == (0, True)
    pools = ReplicaPool.objects.filter(run__name="zeta")
    pools.update(hardware="H100:8")  # of Modal
    assert totals_of("", operator_user).gpus == 3 * 8
    assert totals_of("is:mine", operator_user).gpus == 0
    pools.update(hardware="of an earlier catalogue")
    total = totals_of("", operator_user)
    assert (total.gpus, total.gpus_known) == (0, False)
    assert totals_of("is:mine", operator_user).gpus_known


def test_alerts_are_open_alerts_of_listed_runs(operator_user: Any) -> None:
    def alert(name: str, kind: str, **fields: Any) -> None:
        run = Run.objects.get(name=name) if name else None
        now = timezone.now()
        times = {"first_at": now, "opened_at": now}
        Alert.objects.create(run=run, kind=kind, level="error", message="", **times, **fields)

    for name, kind in (("beta", "nan"), ("beta", "stalled"), ("zeta", "nan"), ("old", "nan")):
        alert(name, kind)
    alert("beta", "spike", closed_at=timezone.now())
    alert("alpha", "nan", acknowledged_at=timezone.now())
    alert("", "shared_budget")
    assert totals_of("", operator_user).alerts == 4
    assert totals_of("is:mine", operator_user).alerts == 3
    assert totals_of("name:nothing", operator_user).alerts == 0


def test_spent_today_is_that_of_the_spend_page(operator_user: Any) -> None:
    now = timezone.now().replace(hour=6, minute=0, second=0, microsecond=0)
    midnight = now.replace(hour=0)
    hour = timedelta(hours=1)
    Run.objects.filter(name="old").delete()  # archived: Spend counts it, and the list does not
    times = {"created_at": midnight - 6 * hour, "launched_at": midnight - 6 * hour}
    jobs = ReplicaAttempt.objects.filter(replica__run__name="beta")
    jobs.filter(ended_at=None).update(started_at=midnight - 6 * hour, cost_usd=48.0, **times)
    jobs.exclude(ended_at=None).update(started_at=now, ended_at=now + hour, cost_usd=9.0)
    yesterday = {"started_at": midnight - 6 * hour, "ended_at": midnight - hour, "cost_usd": 70.0}
    attempts = ReplicaAttempt.objects.filter(replica__run__name="alpha")
    attempts.filter(replica__number=1).update(**times, **yesterday)
    Run.objects.filter(name="beta").update(traffic_usd=2.0, started_at=midnight - 6 * hour)

    def today(text: str) -> tuple[float, bool]:
        runs = matching(Run.objects.all(), parse(text), user=operator_user)
        total = totals.totals(runs, now=now + hour)
        return round(total.today_usd, 6), total.today_known

    page = spend.spend(operator_user, Period.until(now.date(), days=1), JobFilter(), now=now + hour)
    assert today("is:mine") == (round(2 * 24.0 + 9.0 + 2.0 * 7 / 13, 6), True)
    assert today("") == (round(page["total"]["usd"], 6), False)
    assert page["total"]["unpriced_jobs"]
    assert today("name:gamma") == (0.0, True)
    # A run that was deleted and imported again: what is stored for it does not count twice.
    RetainedSpend.objects.create(
        run=Run.objects.get(name="beta").pk,
        run_name="beta",
        owner="olga",
        backend="modal",
        day=now.date(),
        usd=57.0,
        deleted_at=now + hour,
    )
    assert today("is:mine") == (0.0, True)


def test_the_number_of_queries_is_constant(operator_user: Any) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            totals_of("cost>=0", operator_user)
        return len(captured)

    before = queries()
    for number in range(5):
        make(operator_user, f"more {number}", (1.0, "runs"), (None, "runs"))
    assert queries() == before == 11


def test_a_job_that_ends_while_it_is_counted_counts_once(
    operator_user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, hour = timezone.now().replace(hour=12), timedelta(hours=1)
    began = dict.fromkeys(("created_at", "launched_at", "started_at"), now - 2 * hour)
    ReplicaAttempt.objects.filter(launch_key="alpha-0").update(**began, cost_usd=10.0)
    run = Run.objects.get(name="alpha")
    expected = budgets.spent_by_run(now.date(), now)[0][run.pk]
    execute = CursorWrapper.execute

    def ending(cursor: CursorWrapper, sql: str, params: Any = None) -> Any:
        found = execute(cursor, sql, params)
        if 'ended_at" IS NULL' in sql and not ended:
            ended.append(sql)
            ReplicaAttempt.objects.filter(launch_key="alpha-0").update(ended_at=now)
        return found

    ended: list[str] = []
    monkeypatch.setattr(CursorWrapper, "execute", ending)
    raced = budgets.spent_by_run(now.date(), now)[0][run.pk]
    assert ended and (raced.usd, raced.unpriced_jobs) == (expected.usd, expected.unpriced_jobs)
