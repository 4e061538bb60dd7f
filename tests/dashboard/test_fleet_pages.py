"""The replica page, and the actions of operators on replicas and pools."""

from __future__ import annotations

import copy
import html
import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.messages import get_messages
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from executors.base import AccountError
from runs.models import (
    Event,
    IngestState,
    Journal,
    QuarantinedRecord,
    Replica,
    ReplicaAttempt,
    ReplicaPool,
    Run,
)
from runs.reconcile.bucket_writes import WRITE_FAILED
from tests.browser import seed, seed_fleet
from tests.dashboard.page_harness import client_for, pool_fields
from tests.dashboard.stub_backend import Stub, stubbed
from tests.module_rows import Unblock

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def modal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    yield from stubbed(monkeypatch)


@pytest.fixture(scope="module")
def seeded(module_rows: Unblock) -> Any:
    with module_rows():
        return seed_fleet.mixed(seed.user("olga", "operator"), state="running")


@pytest.fixture
def run(db: None, client: Client, seeded: Any) -> Any:
    run = copy.deepcopy(seeded)
    client.force_login(run.owner)
    return run


def url(name: str, run: Run, *args: Any) -> str:
    return reverse(name, args=[run.pk, *args])


def messages_of(response: Any) -> str:
    return " ".join(str(m) for m in get_messages(response.wsgi_request))


# The page of a replica.


def test_attempts_show_cause_exit_code_message_times_and_cost(client: Client, run: Run) -> None:
    page = client.get(url("replica", run, 3)).content.decode()
    for text in ("out of memory", "137", "OOMKilled", "preempted", "$2.90", "modal-7f3c00010003"):
        assert text in page
    assert page.count("data-clock") >= 9
    assert "Backend status" in page


def test_quarantined_records_are_shown_with_their_reason(client: Client, run: Run) -> None:
    assert "Quarantined records" not in client.get(url("replica", run, 3)).content.decode()
    now = timezone.now()
    for name, at in (("poison", now), ("suspected", None)):
        QuarantinedRecord.objects.create(
            run=run,
            replica=run.replicas.get(number=3),
            key=f"telemetry/00003/{name}.json",
            size_bytes=15_000_000,
            reason="OverflowError: <out of range>",
            failures=3,
            first_at=now,
            last_at=now,
            quarantined_at=at,
        )
    page = client.get(url("replica", run, 3)).content.decode()
    assert "Quarantined records" in page
    assert "telemetry/00003/poison.json" in page
    assert "OverflowError: &lt;out of range&gt;" in page
    assert "suspected" not in page
    assert "poison" not in client.get(url("replica", run, 2)).content.decode()


def test_a_bucket_that_cannot_be_read_is_a_banner(client: Client, run: Run) -> None:
    assert "Progress is unknown" not in client.get(url("run", run)).content.decode()
    state = IngestState.objects.create(
        run=run, trouble="away", trouble_since=timezone.now(), message="no route to <bucket>"
    )
    for page in (url("run", run), url("replica", run, 3)):
        text = client.get(page).content.decode()
        assert "Progress is unknown" in text
        assert "no route to &lt;bucket&gt;" in text
        assert "data-clock" in text
    IngestState.objects.filter(pk=state.pk).update(trouble="")
    assert "Progress is unknown" not in client.get(url("run", run)).content.decode()


def test_a_bucket_that_cannot_be_written_is_a_banner(client: Client, run: Run) -> None:
    state = IngestState.objects.create(run=run)
    Journal.objects.update_or_create(run=run, defaults={"failures": 2})
    Event.objects.create(
        run=run,
        kind="store",
        at=timezone.now(),
        message=f"the journal {WRITE_FAILED}: 403 <AccessDenied>",
    )
    for page in (url("run", run), url("replica", run, 3)):
        text = client.get(page).content.decode()
        assert "rendezvous of this run can't be written" in text
        assert "403 &lt;AccessDenied&gt;" in text
    IngestState.objects.filter(pk=state.pk).update(trouble="away", trouble_since=timezone.now())
    assert "can't be written" not in client.get(url("run", run)).content.decode(), "one reason"
    IngestState.objects.filter(pk=state.pk).update(trouble="")
    Journal.objects.filter(run=run).update(failures=0)
    assert "can't be written" not in client.get(url("run", run)).content.decode()


def test_the_url_selects_the_attempt_whose_log_is_shown(client: Client, run: Run) -> None:
    page = lambda query: client.get(url("replica", run, 3) + query).content.decode()  # noqa: E731
    assert 'data-attempt="4"' in page("")
    assert 'data-attempt="2"' in page("?attempt=2")
    assert 'data-attempt="4"' in page("?attempt=99")
    assert 'data-attempt="4"' in page("?attempt=x")


def test_the_page_of_a_replica_that_was_never_launched(client: Client, run: Run) -> None:
    ReplicaAttempt.objects.all().delete()
    page = client.get(url("replica", run, 3)).content.decode()
    assert "Not launched yet" in page
    assert "data-log-lines" not in page


def test_the_changing_fragment_can_be_requested_alone(client: Client, run: Run) -> None:
    part = client.get(url("replica", run, 3) + "?part=1").content.decode()
    assert part.lstrip().startswith('<div class="run-title" ')
    assert "<html" not in part


def test_backend_messages_are_escaped(client: Client, run: Run) -> None:
    ReplicaAttempt.objects.filter(replica__number=3, number=1).update(
        message="<script>x</script>", handle={"data": {"<b>": "<i>"}}
    )
    page = client.get(url("replica", run, 3)).content.decode()
    assert "<script>x" not in page
    assert "<b>:" not in page
    assert "<i>" not in page


@pytest.mark.parametrize("number", [99, 10**30])
def test_an_unknown_replica_is_a_404(client: Client, run: Run, number: int) -> None:
    assert client.get(url("replica", run, number)).status_code == 404
    assert client.get(url("replica-log", run, number) + "?attempt=1").status_code == 404
    assert client.post(url("replica-stop", run, number)).status_code == 404


def test_a_replica_of_another_run_is_a_404(client: Client, run: Run) -> None:
    other = seed.run(seed.user("olga", "operator"), committed=0, replicas=1)
    assert client.get(url("replica", other, 3)).status_code == 404


@pytest.mark.parametrize("attempts", [1, 30])
def test_the_number_of_queries_of_the_page_is_constant(
    client: Client, run: Run, attempts: int, django_assert_num_queries: Any
) -> None:
    replica = run.replicas.get(number=3)
    replica.attempts.all().delete()
    seed_fleet.attempts(
        replica, backend="modal", price=1.0, earlier=attempts - 1, now=run.created_at
    )
    # Session, user, roles, the run, the replica, its jobs, and its attempts; rounds, its part in
    # them twice, its log tail twice; the state of ingest, and quarantined records.
    with django_assert_num_queries(18):
        client.get(url("replica", run, 3))


# Its log.


def test_log_lines_are_followed_from_a_position(client: Client, run: Run, modal: Stub) -> None:
    modal.lines = ["a", "b"]
    address = url("replica-log", run, 3)
    body = client.get(address, {"attempt": 4}).json()
    assert body == {
        "lines": ["a", "b"],
        "position": "2",
        "cut": False,
        "unknown": "",
        "ended": False,
    }
    modal.lines.append("c")
    assert client.get(address, {"attempt": 4, "after": "2"}).json()["lines"] == ["c"]
    assert client.get(address, {"attempt": 1}).json()["ended"] is True


def test_the_log_is_plain_text_without_javascript(client: Client, run: Run, modal: Stub) -> None:
    page = client.get(url("replica", run, 3)).content.decode()
    link = re.search(r'<noscript><p class="table-more"><a class="btn btn-s" href="([^"]*)"', page)
    assert link is not None
    modal.lines = ["<b>a", "b\ud800"]  # JSON of a backend can have lone surrogates
    response = client.get(html.unescape(link[1]))
    assert response.content == b"<b>a\nb?\n"
    assert response["Content-Type"] == "text/plain; charset=utf-8"
    assert response["X-Content-Type-Options"] == "nosniff"


def test_an_unavailable_backend_log_is_reported_without_an_error_page(
    client: Client, run: Run, modal: Stub
) -> None:
    modal.error = AccountError("the token has expired")
    response = client.get(url("replica-log", run, 3), {"attempt": 4})
    assert response.status_code == 200
    assert response.json()["unknown"] == "the token has expired"


@pytest.mark.parametrize(("attempt", "status"), [("", 400), ("x", 400), ("99", 404)])
def test_an_unknown_attempt_is_a_404(client: Client, run: Run, attempt: str, status: int) -> None:
    assert client.get(url("replica-log", run, 3), {"attempt": attempt}).status_code == status


# Actions on a replica.


@pytest.mark.parametrize("force", ["", "1"])
def test_stop_drains_unless_forced(client: Client, run: Run, force: str) -> None:
    Replica.objects.filter(run=run, number=3).update(worked_since=run.created_at)
    response = client.post(url("replica-stop", run, 3), {"force": force})
    assert response["Location"] == url("replica", run, 3)
    replica = run.replicas.get(number=3)
    assert replica.state == "draining"
    assert replica.cancel_at is not None
    now = Event.objects.filter(replica=replica).latest("id").at
    assert (replica.cancel_at > now) == (force == "")
    event = Event.objects.filter(replica=replica).latest("id")
    assert event.actor is not None
    assert event.actor.get_username() == "olga"


def test_restart_relaunches_the_same_replica(client: Client, run: Run) -> None:
    response = client.post(url("replica-restart", run, 3), {"from": "run"})
    assert response["Location"] == url("run", run) + "?tab=replicas"
    assert run.replicas.get(number=3).state == "restarting"
    assert "Replica 3: restarting." in messages_of(response)


def test_actions_in_the_wrong_state_show_a_warning(client: Client, run: Run) -> None:
    Run.objects.filter(pk=run.pk).update(state="succeeded")
    response = client.post(url("replica-restart", run, 3))
    assert "succeeded" in messages_of(response)
    Replica.objects.filter(run=run, number=3).update(state="evicted")
    assert "is already" in messages_of(client.post(url("replica-stop", run, 3)))
    assert run.replicas.get(number=3).state == "evicted"


@pytest.mark.parametrize("name", ["replica-stop", "replica-restart"])
def test_replica_actions_require_post(client: Client, run: Run, name: str) -> None:
    assert client.get(url(name, run, 3)).status_code == 405
    assert run.replicas.get(number=3).state == "uploading"


@pytest.mark.parametrize("kind", ["viewer", "stranger"])
def test_replica_actions_require_permission(run: Run, kind: str) -> None:
    client = client_for(kind, run.owner)
    pool = run.pools.get(backend="local")
    for address in (url("replica-stop", run, 3), url("replica-restart", run, 3)):
        assert client.post(address, {"force": "1"}).status_code == 403
    assert client.post(url("pool-scale", run, pool.pk), {"count": "9"}).status_code == 403
    assert client.post(url("pool-add", run), pool_fields()).status_code == 403
    assert run.replicas.get(number=3).state == "uploading"
    assert run.pools.get(pk=pool.pk).count == 2
    assert run.pools.count() == 5


# The run page.


def test_the_header_shows_cost_and_budget(client: Client, run: Run) -> None:
    page = client.get(url("run", run)).content.decode()
    assert "of $15.00 budget" in page
    ReplicaPool.objects.filter(price_usd_h=None).update(price_usd_h=1.0)
    assert 'data-s="cost">$12.35' in client.get(url("run", run)).content.decode()


@pytest.mark.parametrize("name", ["run", "run-snapshot"])
def test_the_number_of_queries_of_the_run_page_is_constant(client: Client, name: str) -> None:
    operator_user = seed.user("olga", "operator")
    client.force_login(operator_user)
    counts = []
    for replicas in (10, 60):
        run = seed_fleet.mixed(operator_user, replicas=replicas, committed=0)
        with CaptureQueriesContext(connection) as queries:
            assert client.get(url(name, run)).status_code == 200
        counts.append(len(queries))
    assert counts[0] == counts[1]
