"""The runs list as somebody works with it: query box, order, filters, several runs at once."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from dashboard.views import runs as view
from runs.models import Event, Run
from runs.queries import listing
from tests.browser import seed
from tests.dashboard.people import client_for, some, told

pytestmark = pytest.mark.django_db


def names(answer: Any) -> list[str]:
    return [row["header"]["name"] for row in answer.context["rows"]]


def test_a_query_narrows_the_list_and_stays_in_the_box(client: Client, olga: Any) -> None:
    _, two = some(olga, 2)
    Run.objects.filter(pk=two.pk).update(eval_loss=9.0, tags=["<b>"])
    answer = client.get("/", {"q": "state:running loss<8"})
    assert names(answer) == ["r0"]
    assert 'value="state:running loss&lt;8"' in answer.content.decode()
    assert names(client.get("/", {"q": "tag:<b>"})) == ["r1"]
    assert "<b></i>" not in client.get("/").content.decode()


def test_what_is_not_understood_is_said_at_the_box_and_hides_nothing(
    client: Client, olga: Any
) -> None:
    some(olga, 1)
    answer = client.get("/", {"q": "los<3 <script>"})
    page = answer.content.decode()
    assert answer.status_code == 422
    assert names(answer) == []
    assert 'aria-invalid="true" aria-describedby="q-error"' in page
    assert "expected one of state, backend" in page
    assert "<script>" not in page
    assert "The query was not understood" in page
    polled = client.get("/runs.json", {"q": "los<3"})
    assert polled.status_code == 422
    assert "expected one of" in polled.json()["error"]


def test_no_match_is_not_first_use(client: Client, olga: Any) -> None:
    some(olga, 1)
    page = client.get("/", {"q": "nothing-like-it"}).content.decode()
    assert "No run matches" in page
    assert "No runs yet" not in page


def test_archived_runs_are_left_out_and_found(client: Client, olga: Any) -> None:
    (run,) = some(olga, 1, state="succeeded")
    client.post("/runs/bulk", {"do": "archive", "id": str(run.pk)})
    assert "All runs are archived" in client.get("/").content.decode()
    assert names(client.get("/", {"q": "is:archived"})) == ["r0"]


@pytest.mark.parametrize("sort", ["loss", "-loss", "name", "-name", "tokens", "-cost", "started"])
def test_pages_in_any_order(
    client: Client, olga: Any, monkeypatch: pytest.MonkeyPatch, sort: str
) -> None:
    monkeypatch.setattr(view, "PAGE_SIZE", 2)
    for place, run in enumerate(some(olga, 5)):
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


def test_the_order_is_told_and_turned(client: Client, olga: Any) -> None:
    some(olga, 1)
    page = client.get("/", {"sort": "loss", "q": "r0"}).content.decode()
    assert 'aria-sort="ascending"><a href="?q=r0&amp;sort=-loss">Eval loss</a>' in page
    assert '<a href="?q=r0&amp;sort=-tokens">Tokens</a>' in page


def test_new_ones_are_counted_by_the_query(client: Client, olga: Any) -> None:
    since = "2020-01-01T00:00:00+00:00"
    some(olga, 3)
    assert client.get("/runs.json", {"since": since}).json()["new"] == 3
    assert client.get("/runs.json", {"since": since, "q": "r1"}).json()["new"] == 1
    late = {"since": "2100-01-01T00:00:00+00:00"}
    assert client.get("/runs.json", late).json()["new"] == 0
    assert "new" not in client.get("/runs.json", {"since": "yesterday"}).json()


def test_filters_are_asked_for_and_lead_to_queries(client: Client, olga: Any) -> None:
    some(olga, 2)
    some(olga, 1, state="failed")
    page = client.get("/runs/facets", {"q": "backend:local"}).content.decode()
    assert 'href="?q=backend%3Alocal+state%3Afailed"' in page
    whole = client.get("/", {"facets": "1"}).content.decode()
    assert 'href="?q=state%3Afailed"' in whole
    assert client.get("/runs/facets", {"q": "los<3"}).status_code == 200


def test_filters_say_how_many_runs_they_counted(
    client: Client, olga: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    some(olga, 2)
    assert "Counted over" not in client.get("/runs/facets").content.decode()
    monkeypatch.setattr(listing, "COUNTED", 1)
    assert "Counted over the newest 1 runs" in client.get("/runs/facets").content.decode()


def test_somebody_without_a_role_is_told_nothing(olga: Any) -> None:
    some(olga, 1)
    client = Client()
    client.force_login(seed.user("nobody", ""))
    assert b"olga" not in client.get("/runs/facets").content
    page = client.get("/").content.decode()
    assert "You have no role yet" in page
    assert 'title="r0"' not in page


@pytest.mark.parametrize("query", ["", "state:running backend:local loss<9 tag:x -name:z 4"])
def test_the_number_of_queries_does_not_grow(client: Client, olga: Any, query: str) -> None:
    def asked() -> int:
        with CaptureQueriesContext(connection) as queries:
            client.get("/", {"q": query})
        return len(queries)

    Run.objects.filter(pk__in=[run.pk for run in some(olga, 1)]).update(tags=["x"], name="4")
    few = asked()
    Run.objects.filter(pk__in=[run.pk for run in some(olga, 6)]).update(tags=["x"], name="4")
    assert asked() == few


# Several at once.


def test_compare_leads_to_the_comparison_in_the_order_of_selecting(
    client: Client, olga: Any
) -> None:
    one, two = some(olga, 2)
    sent = {"do": "compare", "id": [str(two.pk), str(one.pk), "nonsense"]}
    assert client.post("/runs/bulk", sent)["Location"] == f"/compare?ids={two.pk},{one.pk}"


def test_stop_is_asked_once_more(client: Client, olga: Any) -> None:
    one, two = some(olga, 2)
    (ended,) = some(olga, 1, state="succeeded")
    sent = {"do": "stop", "id": [str(r.pk) for r in (one, two, ended)], "back": "q=r&sort=loss"}
    page = client.post("/runs/bulk", sent).content.decode()
    assert "Stop 2 runs?" in page
    assert "1 ended already" in page
    assert not Run.objects.exclude(stop_requested_at=None).exists()
    answer = client.post("/runs/bulk", sent | {"confirmed": "1"}, follow=True)
    assert answer.redirect_chain[0][0] == "/?q=r&sort=loss"
    assert "2 stopping; 1 were so already" in told(answer)
    assert Run.objects.exclude(stop_requested_at=None).count() == 2


def test_archive_says_which_could_not_be(client: Client, olga: Any) -> None:
    (running,) = some(olga, 1)
    (ended,) = some(olga, 1, state="failed")
    sent = {"do": "archive", "id": [str(running.pk), str(ended.pk)]}
    answer = client.post("/runs/bulk", sent, follow=True)
    assert "1 archived; r0: expected a run that is over, found one running" in told(answer)
    ended.refresh_from_db()
    assert ended.archived_at is not None
    client.post("/runs/bulk", {"do": "restore", "id": str(ended.pk)})
    ended.refresh_from_db()
    assert ended.archived_at is None


def test_tags_are_added_to_those_there_are(client: Client, olga: Any) -> None:
    (run,) = some(olga, 1)
    Run.objects.filter(pk=run.pk).update(tags=["a"], notes="kept")
    client.post("/runs/bulk", {"do": "tag", "tag": "b c", "id": str(run.pk)})
    run.refresh_from_db()
    assert (run.tags, run.notes) == (["a", "b", "c"], "kept")
    answer = client.post("/runs/bulk", {"do": "tag", "tag": "x:y", "id": str(run.pk)}, follow=True)
    assert "expected tags of 1 to 40 characters" in told(answer)


@pytest.mark.parametrize(
    ("kind", "status", "changed"),
    [("viewer", 403, 0), ("stranger", 302, 0), ("owner", 302, 1), ("admin", 302, 1)],
)
@pytest.mark.parametrize("do", ["stop", "archive", "tag"])
def test_operators_act_on_their_own_runs(
    olga: Any, do: str, kind: str, status: int, changed: int
) -> None:
    (run,) = some(olga, 1, state="running" if do == "stop" else "failed")
    Event.objects.all().delete()
    sent = {"do": do, "id": str(run.pk), "confirmed": "1", "tag": "x"}
    client = client_for(kind, olga)
    answer = client.post("/runs/bulk", sent)
    assert answer.status_code == status
    assert Event.objects.exists() == bool(changed)
    if kind == "stranger":
        assert "operators act on their own runs" in told(client.get("/"))


def test_a_stranger_is_not_asked_to_stop_what_is_not_theirs(olga: Any) -> None:
    (run,) = some(olga, 1)
    page = client_for("stranger", olga).post("/runs/bulk", {"do": "stop", "id": str(run.pk)})
    assert "None of them can be stopped by you" in page.content.decode()
    assert 'name="id"' not in page.content.decode()


def test_a_viewer_may_select_only_to_compare(olga: Any) -> None:
    (run,) = some(olga, 1)
    client = client_for("viewer", olga)
    page = client.get("/").content.decode()
    assert 'value="compare"' in page
    for word in ("stop", "archive", "tag"):
        assert f'name="do" value="{word}"' not in page
    sent = {"do": "compare", "id": str(run.pk)}
    assert client.post("/runs/bulk", sent)["Location"] == f"/compare?ids={run.pk}"


@pytest.mark.parametrize("sent", [{}, {"do": "drop"}])
def test_what_is_no_action_is_refused(client: Client, olga: Any, sent: dict[str, str]) -> None:
    assert client.post("/runs/bulk", sent).status_code == 400


@pytest.mark.parametrize("back", ["//evil.example", "https://evil.example", "/x", "?q=a"])
def test_the_way_back_leads_to_the_list_only(client: Client, olga: Any, back: str) -> None:
    (run,) = some(olga, 1, state="failed")
    sent = {"do": "archive", "id": str(run.pk), "back": back}
    assert client.post("/runs/bulk", sent)["Location"].startswith("/?")
