"""The page of spending: periods, chart, tables, unknown costs, and limits."""

from __future__ import annotations

import datetime
import re
from typing import Any

import pytest
from django.test import Client

from runs.models import Run
from tests.browser import seed, seed_spend

pytestmark = pytest.mark.django_db
HOSTILE = "<script>alert(1)</script>\"'"


@pytest.fixture
def viewer() -> Client:
    client = Client()
    client.force_login(seed.user("vera", "viewer"))
    return client


@pytest.fixture
def run() -> Any:
    made = seed.run(seed.user("olga", "operator"), name="Priced", replicas=2, committed=1)
    return seed_spend.history(made, days=3, price=2.0, backend="modal", tags=["paper"])


def page(client: Client, query: str = "", status: int = 200) -> str:
    response = client.get(f"/spend{query}")
    assert response.status_code == status
    return response.content.decode()


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def test_sums_chart_and_tables_without_a_script(viewer: Client, run: Run) -> None:
    html = page(viewer)
    text = text_of(html)
    for part in ("Rate now $4.00/h", "Forecast for the month", "Modal", "olga", "Priced", "paper"):
        assert part in text
    assert html.count('<rect class="s-') > 3
    assert html.count('<tr><th scope="row">2') == 7
    assert f'href="/runs/{run.pk}/"' in html
    assert "unknown" not in text_of(html.partition("How this is computed")[0])


def test_last_week_is_one_click_away(viewer: Client, run: Run) -> None:
    links = dict(re.findall(r'<a href="(\?from=[^"]*)"[^>]*>([^<]*week)</a>', page(viewer)))
    ((link, label),) = links.items()
    assert label == "Last week"
    response = viewer.get(f"/spend{link.replace('&amp;', '&')}&owner=olga")
    first, last = response.context["period"].first, response.context["period"].last
    today = response.context["today"]
    assert (first.weekday(), last - first) == (0, datetime.timedelta(days=6))
    assert last < today <= last + datetime.timedelta(days=7)
    assert 'aria-current="true">Last week' in response.content.decode()


def test_the_csv_has_the_period_and_the_filters_of_the_page(viewer: Client, run: Run) -> None:
    html = page(viewer, "?days=3&owner=olga")
    (link,) = re.findall(r'<a class="btn" href="(/api/spend.csv[^"]*)" download', html)
    response = viewer.get(link.replace("&amp;", "&"))
    today = datetime.datetime.now(datetime.UTC).date()
    name = f"spend-olga-{today - datetime.timedelta(days=2)}-{today}.csv"
    assert response["Content-Disposition"] == f'attachment; filename="{name}"'
    text = b"".join(response.streaming_content).decode()
    kinds = [line.partition(",")[0] for line in text.splitlines()]
    assert kinds == ["by", "total", *["day"] * 3, "backend", "owner", "run", "tag"]


def test_unknown_costs_are_shown_as_unknown(viewer: Client, run: Run) -> None:
    other = seed.run(seed.user("oscar", "operator"), name="Unpriced", replicas=1, committed=1)
    seed_spend.history(other, days=1, price=None, backend="kubernetes", tags=[])
    html = page(viewer)
    text = text_of(html)
    assert "1 job without a price ran for 9h" in text
    assert re.search(r"Unpriced 1 unknown", text)
    assert re.search(r"Rate now \$4.00/h \+ unknown", text)
    only = text_of(page(viewer, "?owner=oscar"))
    assert "Spent unknown" in only
    assert "No job with a known price ran in this period" in only
    assert '<details class="day-table fold" open>' in page(viewer, "?owner=oscar")


@pytest.mark.parametrize(
    ("query", "days"),
    [("?days=30", 30), ("?days=366", 366), ("?days=1", 1), ("", 7)],
)
def test_periods(viewer: Client, run: Run, query: str, days: int) -> None:
    assert page(viewer, query).count('<tr><th scope="row">2') == days


def test_a_period_by_its_days(viewer: Client, run: Run) -> None:
    today = datetime.datetime.now(datetime.UTC).date()
    html = page(viewer, f"?from={today - datetime.timedelta(days=2)}&to={today}&owner=olga")
    assert html.count('<tr><th scope="row">2') == 3
    assert f'value="{today}"' in html
    assert '<input type="hidden" name="owner" value="olga">' in html


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("?days=0", "expected 1 to 366 days, found &#x27;0&#x27;"),
        ("?days=367", "expected 1 to 366 days"),
        ("?from=yesterday", "expected a day such as 2026-01-31"),
        ("?from=2026-02-30", "expected a day such as 2026-01-31"),
        ("?from=2020-01-01&to=2019-01-01", "expected a first day up to 2019-01-01"),
        ("?from=2019-01-01", "expected at most 366 days"),
        ("?from=1000-01-01", "expected days from 2000-01-01"),
        ("?to=0001-01-01", "expected a later day"),
        ("?to=9999-12-31", "expected days from 2000-01-01"),
    ],
)
def test_a_wrong_period_is_an_error(viewer: Client, run: Run, query: str, why: str) -> None:
    html = page(viewer, query, status=422)
    assert why in html
    assert "The last 7 days are shown" in html


def test_nothing_spent(viewer: Client) -> None:
    html = page(viewer)
    assert "Nothing was spent in this period" in html
    assert "$0.00" in html
    assert '<details class="day-table fold">' in html


def test_text_of_others_is_escaped(viewer: Client, run: Run) -> None:
    Run.objects.update(name=HOSTILE, tags=[HOSTILE, {"no": "text"}, HOSTILE])
    run.pools.update(backend=HOSTILE[:32])
    for query in ("", f"?backend={HOSTILE}&owner={HOSTILE}"):
        assert "<script>alert" not in page(viewer, query)
