"""Working with the runs list: search field, order, filters, bulk actions."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from dashboard.views import runs as view
from runs.actions import bulk, lifecycle
from runs.models import Event, Run
from runs.queries import comparison, listing
from tests.browser import seed
from tests.dashboard.page_harness import client_for, make_runs, messages_of
from tests.matrix import matrix

pytestmark = pytest.mark.django_db


def names(response: Any) -> list[str]:
    return [row.header["name"] for row in response.context["rows"]]


def test_a_query_filters_the_list_and_stays_in_the_field(
    client: Client, operator_user: Any
) -> None:
    _, two = make_runs(operator_user, 2)
    Run.objects.filter(pk=two.pk).update(eval_loss=9.0, tags=["<b>"])
    response = client.get("/", {"q": "state:running loss<8"})
    assert names(response) == ["r0"]
    assert 'value="state:running loss&lt;8"' in response.content.decode()
    assert names(client.get("/", {"q": "tag:<b>"})) == ["r1"]
    assert "<b></i>" not in client.get("/").content.decode()


def test_an_invalid_query_shows_an_error_at_the_field(client: Client, operator_user: Any) -> None:
    make_runs(operator_user, 1)
    response = client.get("/", {"q": "los<3 <script>"})
    page = response.content.decode()
    assert response.status_code == 422
    assert names(response) == []
    assert 'aria-invalid="true" aria-describedby="q-error"' in page
    assert "expected one of state, backend" in page
    assert "<script>" not in page
    assert "The query couldn't be parsed" in page
    polled = client.get("/runs.json", {"q": "los<3"})
    assert polled.status_code == 422
    assert "expected one of" in polled.json()["error"]


def test_no_match_differs_from_an_empty_server(client: Client, operator_user: Any) -> None:
    make_runs(operator_user, 1)
    page = client.get("/", {"q": "nothing-like-it"}).content.decode()
    assert "No run matches" in page
    assert "No runs yet" not in page


def test_archived_runs_are_hidden_but_searchable(client: Client, operator_user: Any) -> None:
    (run,) = make_runs(operator_user, 1, state="succeeded")
    client.post("/runs/bulk", {"do": "archive", "id": str(run.pk)})
    assert "All runs are archived" in client.get("/").content.decode()
    assert names(client.get("/", {"q": "is:archived"})) == ["r0"]


@matrix(
    "sort",
    ["loss", "-loss", "name", "-name", "tokens", "-cost", "started"],
    fast=("-loss", "started"),
)
def test_pages_in_any_order(
    client: Client, operator_user: Any, monkeypatch: pytest.MonkeyPatch, sort: str
) -> None:
    monkeypatch.setattr(view, "PAGE_SIZE", 2)
    for place, run in enumerate(make_runs(operator_user, 5)):
        Run.objects.filter(pk=run.pk).update(eval_loss=[2.0, None, 3.0, 2.0, 1.0][place])
    seen: list[str] = []
    address = f"/?sort={sort}"
    while address:
        page = client.get(address).content.decode()
        seen += re.findall(r'title="(r\d)"', page)
        link = re.search(r'href="([^"]+)" rel="next"', page)
        address = f"/{html.unescape(link[1])}" if link else ""
    assert sorted(seen) == ["r0", "r1", "r2", "r3", "r4"]
    if sort == "-loss":
        assert (seen[0], seen[-1]) == ("r2", "r1")


def test_the_order_is_shown_and_reversed(client: Client, operator_user: Any) -> None:
    make_runs(operator_user, 1)
    page = client.get("/", {"sort": "loss", "q": "r0"}).content.decode()
    assert 'aria-sort="ascending"><a href="?q=r0&amp;sort=-loss">Eval loss</a>' in page
    assert '<a href="?q=r0&amp;sort=-tokens">Tokens</a>' in page


def test_new_runs_that_match_the_query_are_counted(client: Client, operator_user: Any) -> None:
    since = "2020-01-01T00:00:00+00:00"
    make_runs(operator_user, 3)
    assert client.get("/runs.json", {"since": since}).json()["new"] == 3
    assert client.get("/runs.json", {"since": since, "q": "r1"}).json()["new"] == 1
    late = {"since": "2100-01-01T00:00:00+00:00"}
    assert client.get("/runs.json", late).json()["new"] == 0
    assert "new" not in client.get("/runs.json", {"since": "yesterday"}).json()


def test_filters_load_on_demand_and_link_to_queries(client: Client, operator_user: Any) -> None:
    make_runs(operator_user, 2)
    make_runs(operator_user, 1, state="failed")
    page = client.get("/runs/facets", {"q": "backend:local"}).content.decode()
    assert 'href="?q=backend%3Alocal+state%3Afailed"' in page
    whole = client.get("/", {"facets": "1"}).content.decode()
    assert 'href="?q=state%3Afailed"' in whole
    assert client.get("/runs/facets", {"q": "los<3"}).status_code == 200


def test_filters_show_the_number_of_counted_runs(
    client: Client, operator_user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_runs(operator_user, 2)
    assert "Counted over" not in client.get("/runs/facets").content.decode()
    monkeypatch.setattr(listing, "COUNTED", 1)
    assert "Counts cover the newest 1 matching runs" in client.get("/runs/facets").content.decode()


def test_users_without_a_role_get_no_filters(operator_user: Any) -> None:
    make_runs(operator_user, 1)
    client = Client()
    client.force_login(seed.user("no-role", ""))
    assert b"olga" not in client.get("/runs/facets").content
    page = client.get("/").content.decode()
    assert "You have no role yet" in page
    assert 'title="r0"' not in page


@pytest.mark.parametrize("query", ["", "state:running backend:local loss<9 tag:x -name:z 4"])
def test_the_number_of_queries_is_constant(client: Client, operator_user: Any, query: str) -> None:
    def count_queries() -> int:
        with CaptureQueriesContext(connection) as queries:
            client.get("/", {"q": query})
        return len(queries)

    Run.objects.filter(pk__in=[run.pk for run in make_runs(operator_user, 1)]).update(
        tags=["x"], name="4"
    )
    few = count_queries()
    Run.objects.filter(pk__in=[run.pk for run in make_runs(operator_user, 6)]).update(
        tags=["x"], name="4"
    )
    assert count_queries() == few


# Bulk actions.


def test_compare_keeps_the_order_of_selection(client: Client, operator_user: Any) -> None:
    one, two = make_runs(operator_user, 2)
    sent = {"do": "compare", "id": [str(two.pk), str(one.pk), "nonsense"]}
    assert client.post("/runs/bulk", sent)["Location"] == f"/compare?ids={two.pk},{one.pk}"


def test_compare_of_many_runs_has_an_address_of_the_first(
    client: Client, operator_user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "MOST", 2)
    runs = make_runs(operator_user, 3)
    newest = f"/compare?ids={runs[2].pk},{runs[1].pk}"
    picked = {"id": [str(run.pk) for run in reversed(runs)]}
    for sent in (picked, {"matching": "1", "back": ""}):
        response = client.post("/runs/bulk", {"do": "compare"} | sent, follow=True)
        assert response.redirect_chain == [(newest, 302)]
        assert messages_of(response) == "Compared are the first 2 of 3 runs."


def test_bulk_stop_asks_for_confirmation(client: Client, operator_user: Any) -> None:
    one, two = make_runs(operator_user, 2)
    (ended,) = make_runs(operator_user, 1, state="succeeded")
    sent = {"do": "stop", "id": [str(r.pk) for r in (one, two, ended)], "back": "q=r&sort=loss"}
    page = client.post("/runs/bulk", sent).content.decode()
    assert "Stop 2 runs?" in page
    assert "1 already ended" in page
    assert not Run.objects.exclude(stop_requested_at=None).exists()
    response = client.post("/runs/bulk", sent | {"confirmed": "1"}, follow=True)
    assert response.redirect_chain[0][0] == "/?q=r&sort=loss"
    assert "2 stopping; 1 already done" in messages_of(response)
    assert Run.objects.exclude(stop_requested_at=None).count() == 2


def test_bulk_archive_reports_failures(client: Client, operator_user: Any) -> None:
    (running,) = make_runs(operator_user, 1)
    (ended,) = make_runs(operator_user, 1, state="failed")
    sent = {"do": "archive", "id": [str(running.pk), str(ended.pk)]}
    response = client.post("/runs/bulk", sent, follow=True)
    assert "1 archived; r0: expected a run that is over, found one running" in messages_of(response)
    ended.refresh_from_db()
    assert ended.archived_at is not None
    client.post("/runs/bulk", {"do": "restore", "id": str(ended.pk)})
    ended.refresh_from_db()
    assert ended.archived_at is None


def test_all_runs_that_match_are_changed_after_a_confirmation(
    client: Client, operator_user: Any
) -> None:
    make_runs(operator_user, 3)
    make_runs(operator_user, 2, state="failed")
    (foreign,) = make_runs(seed.user("oscar", "operator"), 1, state="failed")
    sent = {"matching": "1", "back": "q=state:failed&sort=loss"}
    page = client.post("/runs/bulk", sent | {"do": "archive"}).content.decode()
    assert "Archive 2 runs?" in page
    assert "1 belongs to other users" in page
    assert Run.objects.filter(archived_at=None).count() == 6
    ids = re.findall(r'name="id" value="([^"]+)"', page)
    assert len(ids) == 2
    client.post("/runs/bulk", sent | {"do": "delete", "confirmed": "1", "count": "2"})
    assert not Run.objects.exclude(delete_requested_at=None).exists()
    # The runs that were confirmed, whatever matches by now.
    make_runs(operator_user, 1, state="failed")
    confirmed = {"do": "archive", "confirmed": "1", "id": ids, "back": sent["back"]}
    response = client.post("/runs/bulk", confirmed, follow=True)
    assert response.redirect_chain[0][0] == "/?q=state:failed&sort=loss"
    assert "2 archived" in messages_of(response)
    assert {
        str(pk) for pk in Run.objects.exclude(archived_at=None).values_list("pk", flat=True)
    } == set(ids)
    assert Event.objects.filter(run__in=ids, kind="archived").count() == 2
    foreign.refresh_from_db()
    assert foreign.archived_at is None


def test_a_run_that_is_deleted_meanwhile_is_named(
    client: Client, operator_user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = make_runs(operator_user, 2, state="failed")
    archive = lifecycle.archive

    def deleting(run: Run, **options: Any) -> bool:
        if run.name == "r1":
            Run.objects.filter(pk=run.pk).delete()
        return archive(run, **options)

    monkeypatch.setattr(lifecycle, "archive", deleting)
    sent = {"do": "archive", "id": [str(run.pk) for run in runs]}
    response = client.post("/runs/bulk", sent, follow=True)
    assert messages_of(response) == "1 archived; r1: it was deleted."


@pytest.mark.parametrize(
    ("do", "shown"),
    [
        ("stop", "Stop 3 runs?"),
        ("archive", "Archive 3 runs?"),
        ("restore", "Unarchive 3 runs?"),
        ("tag", "Tag 3 runs with paper?"),
        ("delete", "None of them can be deleted."),
    ],
)
def test_every_change_of_all_that_match_names_the_number(
    client: Client, operator_user: Any, do: str, shown: str
) -> None:
    make_runs(operator_user, 3)
    sent = {"matching": "1", "back": "", "do": do, "tag": "paper"}
    events = Event.objects.count()
    for forged in ({}, {"confirmed": "1", "count": "3"}):  # no page has named the runs
        page = client.post("/runs/bulk", sent | forged).content.decode()
        assert shown in page
    assert Event.objects.count() == events


@pytest.mark.parametrize(
    ("back", "found"),
    [
        ("q=stat:failed", "Did you mean state:failed?"),
        ("q=" + "x" * 2000, "expected a query of at most 2000 characters"),
        ("", "expected at most 2 runs, found 3. Narrow the query"),
    ],
)
def test_too_many_runs_and_invalid_queries_change_nothing(
    client: Client, operator_user: Any, monkeypatch: pytest.MonkeyPatch, back: str, found: str
) -> None:
    monkeypatch.setattr(bulk, "MOST", 2)
    runs = make_runs(operator_user, 3)
    sent = {"matching": "1", "do": "stop", "confirmed": "1", "back": back}
    assert found in messages_of(client.post("/runs/bulk", sent, follow=True))
    if not back:  # picked runs have the same limit
        ids = {"id": [str(run.pk) for run in runs], "do": "stop", "confirmed": "1"}
        assert found in messages_of(client.post("/runs/bulk", ids, follow=True))
    assert not Run.objects.exclude(stop_requested_at=None).exists()


def test_all_that_match_is_offered_for_more_than_a_page(
    client: Client, operator_user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dashboard.views import runs

    make_runs(operator_user, 3)
    offer = 'name="matching" value="1"'
    assert offer not in client.get("/").content.decode()
    monkeypatch.setattr(runs, "PAGE_SIZE", 2)
    assert offer in client.get("/").content.decode()


def test_bulk_tag_adds_tags(client: Client, operator_user: Any) -> None:
    (run,) = make_runs(operator_user, 1)
    Run.objects.filter(pk=run.pk).update(tags=["a"], notes="kept")
    client.post("/runs/bulk", {"do": "tag", "tag": "b c", "id": str(run.pk)})
    run.refresh_from_db()
    assert (run.tags, run.notes) == (["a", "b", "c"], "kept")
    response = client.post(
        "/runs/bulk", {"do": "tag", "tag": "x:y", "id": str(run.pk)}, follow=True
    )
    assert "expected tags of 1 to 40 characters" in messages_of(response)


@pytest.mark.parametrize(
    ("kind", "status", "changed"),
    [("viewer", 403, 0), ("stranger", 302, 0), ("owner", 302, 1), ("admin", 302, 1)],
)
@pytest.mark.parametrize("do", ["stop", "archive", "tag"])
def test_operators_change_only_their_own_runs(
    operator_user: Any, do: str, kind: str, status: int, changed: int
) -> None:
    (run,) = make_runs(operator_user, 1, state="running" if do == "stop" else "failed")
    Event.objects.all().delete()
    sent = {"do": do, "id": str(run.pk), "confirmed": "1", "tag": "x"}
    client = client_for(kind, operator_user)
    response = client.post("/runs/bulk", sent)
    assert response.status_code == status
    assert Event.objects.exists() == bool(changed)
    if kind == "stranger":
        assert "operators can change only their own runs" in messages_of(client.get("/"))


def test_the_stop_page_skips_runs_of_others(operator_user: Any) -> None:
    (run,) = make_runs(operator_user, 1)
    page = client_for("stranger", operator_user).post(
        "/runs/bulk", {"do": "stop", "id": str(run.pk)}
    )
    assert "You can't stop any of these runs" in page.content.decode()
    assert "Back to the runs" in page.content.decode()
    assert "Stop 0 runs" not in page.content.decode()
    assert 'name="id"' not in page.content.decode()


def test_viewers_can_only_compare(operator_user: Any) -> None:
    (run,) = make_runs(operator_user, 1)
    client = client_for("viewer", operator_user)
    page = client.get("/").content.decode()
    assert 'value="compare"' in page
    for word in ("stop", "archive", "tag"):
        assert f'name="do" value="{word}"' not in page
    sent = {"do": "compare", "id": str(run.pk)}
    assert client.post("/runs/bulk", sent)["Location"] == f"/compare?ids={run.pk}"


@pytest.mark.parametrize("sent", [{}, {"do": "drop"}])
def test_unknown_actions_are_rejected(
    client: Client, operator_user: Any, sent: dict[str, str]
) -> None:
    assert client.post("/runs/bulk", sent).status_code == 400


@pytest.mark.parametrize("back", ["//evil.example", "https://evil.example", "/x", "?q=a"])
def test_the_redirect_only_leads_to_the_list(client: Client, operator_user: Any, back: str) -> None:
    (run,) = make_runs(operator_user, 1, state="failed")
    sent = {"do": "archive", "id": str(run.pk), "back": back}
    assert client.post("/runs/bulk", sent)["Location"].startswith("/?")
