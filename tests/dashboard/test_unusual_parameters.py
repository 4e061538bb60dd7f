"""Arbitrary query parameters give a page or a client error, never a server error, and never work
that grows with a number in the URL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from django.test import Client

from tests.browser import seed, seed_fleet
from tests.matrix import matrix

pytestmark = pytest.mark.django_db

PAGES = {
    "/": ("q", "sort", "cols", "before", "group", "view"),
    "/runs.json": ("q", "sort", "before", "since"),
    "/runs/facets": ("q",),
    "/runs/new": ("replicas", "clone", "round"),
    "/planner": ("parameters", "num_replicas", "tokens", "step_s", "mtbf_h", "hardware"),
    "/planner.json": ("parameters", "sync_every", "num_fragments", "codec"),
    "/compare": ("ids", "base"),
    "/compare.json": ("ids",),
    "/compare.csv": ("ids", "base"),
    "/fleet": ("backend", "owner", "state", "before", "part"),
    "/spend": ("from", "to", "days", "backend", "owner"),
    "/api/fleet": ("backend", "owner", "state", "before", "limit"),
    "/api/spend": ("from", "to", "days", "backend", "owner", "limit"),
    "/settings/people": ("q", "after"),
    "/sweeps": ("before",),
    "/api/sweeps": ("before", "limit"),
    "/alerts": ("kind", "run", "owner", "before", "show", "part"),
    "/search": ("q", "run"),
    "{run}": ("tab", "round", "fork"),
    "{run}snapshot.json": ("curves",),
    "{run}series.json": ("of", "x", "from", "to", "points", "replica", "last", "own"),
    "{run}heatmap.json": ("below",),
    "{run}timeline.json": ("from", "to", "columns"),
    "{run}logs.json": ("replica", "after", "level", "text"),
    "{run}activity": ("source", "level", "replica", "text", "before"),
    "{run}checkpoints": (),
    "{run}replicas/0/": ("part", "attempt"),
    "{run}replicas/0/log.json": ("attempt", "after"),
}
NEEDED = {
    "/runs/new": {"fork": "{id}"},
    "{run}series.json": {"of": "loss,eval_loss", "x": "wall"},
    "{run}replicas/0/log.json": {"attempt": "1"},
}
ODD = (
    "0",
    "-1",
    "1" + "0" * 30,
    "-1" + "0" * 30,
    "1" * 5000,
    "9223372036854775807",
    "1e308",
    "1e400",
    "nan",
    "-inf",
    "\x00",
    "a\x00b",
    "'",
    '"',
    "%",
    "\ud7ff\U0010ffff",
    "٣",
    "1_000",
    " 1",
    "a" * 3000,
    ",".join("ab" * 300),
    "00000000-0000-0000-0000-000000000000",
    "0001-01-01T00:00:00+23:59",
    "0001-01-01T00:00:00+23:59_00000000-0000-0000-0000-000000000000",
    "9999-12-31T23:59:59-23:59_00000000-0000-0000-0000-000000000000",
    "../..",
    "[]",
    "{}",
)


@pytest.fixture
def run(client: Client) -> Any:
    from django.utils import timezone

    created = seed.run(seed.user("ada", "admin"), committed=3, replicas=2)
    for replica in created.replicas.all():
        seed_fleet.attempts(replica, backend="local", price=0.0, earlier=0, now=timezone.now())
    client.force_login(created.owner)
    client.raise_request_exception = False
    return created


@matrix("page", PAGES, fast=("/runs.json", "/alerts", "{run}logs.json", "{run}timeline.json"))
def test_unusual_parameters_are_handled(client: Client, run: Any, page: str) -> None:
    path = page.format(run=f"/runs/{run.pk}/")
    needed = {name: text.format(id=run.pk) for name, text in NEEDED.get(page, {}).items()}
    assert client.get(path, needed).status_code == 200
    failed = []
    alone: set[str] = set()  # what is refused hides the others, so it is sent alone
    for parameters in requests(PAGES[page]):
        pending = [{name: parameters[name]} for name in sorted(alone)]
        pending.append({name: parameters[name] for name in parameters if name not in alone})
        while pending:
            sent = pending.pop()
            status = client.get(path, needed | sent).status_code if sent else 200
            if status >= 500:
                failed.append((str(sent)[:200], status))
            elif status >= 400 and len(sent) > 1:
                pending += [{name: value} for name, value in sent.items()]
            elif status >= 400:
                alone |= set(sent)
    assert failed == []


def requests(names: Sequence[str]) -> Iterator[dict[str, str]]:
    """The parameters of requests in which each name has each unusual value once."""
    for first in range(len(ODD) if names else 0):
        values = [ODD[(first + number) % len(ODD)] for number in range(len(names))]
        yield dict(zip(names, values, strict=True))


def test_each_parameter_has_each_unusual_value_once() -> None:
    sent = [pair for parameters in requests(("q", "sort", "view")) for pair in parameters.items()]
    assert len(sent) == len(set(sent)) == 3 * len(ODD)


@pytest.mark.parametrize("page", ["/", "/runs.json", "/compare", "/planner", "/api/runs"])
def test_too_many_parameters_are_rejected(client: Client, run: Any, page: str) -> None:
    for name in ("q", "state", "ids"):
        many = "&".join(f"{name}=queued" for _ in range(1100))
        assert client.get(f"{page}?{many}").status_code < 500


def test_a_query_with_the_maximum_number_of_terms(client: Client, run: Any) -> None:
    for word in ("a ", "-a ", "tag:a ", "loss<3 ", "replicas>1 ", "backend:a "):
        query = (word * 500)[:500].rstrip(":<> ")
        for page in ("/", "/runs/facets", "/api/runs"):
            assert client.get(page, {"q": query}).status_code < 500, (word, page)
    values = "tag:" + ",".join("abcdefghij" * 24)
    assert client.get("/api/runs", {"q": values}).status_code == 200


def test_the_submit_form_accepts_invalid_numbers_in_the_url(client: Client, run: Any) -> None:
    for value in ("abc", "1" * 5000, ""):
        response = client.get("/runs/new", {"replicas": "9", "max_replicas": value})
        assert response.status_code == 200
