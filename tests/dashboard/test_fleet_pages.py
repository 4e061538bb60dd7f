"""The page of a replica, and what operators do with replicas and pools."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.messages import get_messages
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from executors.base import NeedsPerson
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
from tests.dashboard.people import client_for
from tests.dashboard.stub_backend import Stub, stubbed

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def modal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    yield from stubbed(monkeypatch)


@pytest.fixture
def run(client: Client) -> Any:
    olga = seed.user("olga", "operator")
    client.force_login(olga)
    return seed_fleet.mixed(olga, state="running")


def url(name: str, run: Run, *args: Any) -> str:
    return reverse(name, args=[run.pk, *args])


def said(answer: Any) -> str:
    return " ".join(str(m) for m in get_messages(answer.wsgi_request))


# The page of a replica.


def test_attempts_stand_there_with_cause_exit_code_message_times_and_cost(
    client: Client, run: Run
) -> None:
    page = client.get(url("replica", run, 3)).content.decode()
    for text in ("out of memory", "137", "OOMKilled", "preempted", "$2.90", "modal-7f3c00010003"):
        assert text in page
    assert page.count("data-clock") >= 9
    assert "Modal says" in page


def test_quarantined_records_are_shown_with_their_reason(client: Client, run: Run) -> None:
    assert "Quarantined records" not in client.get(url("replica", run, 3)).content.decode()
    now = timezone.now()
    for name, at in (("poison", now), ("suspected", None)):
        QuarantinedRecord.objects.create(
            run=run, replica=run.replicas.get(number=3), key=f"telemetry/00003/{name}.json",
            size_bytes=15_000_000, reason="OverflowError: <out of range>", failures=3,
            first_at=now, last_at=now, quarantined_at=at,
        )  # fmt: skip
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


def test_the_log_of_the_attempt_in_the_address_is_shown(client: Client, run: Run) -> None:
    page = lambda query: client.get(url("replica", run, 3) + query).content.decode()  # noqa: E731
    assert 'data-attempt="4"' in page("")
    assert 'data-attempt="2"' in page("?attempt=2")
    assert 'data-attempt="4"' in page("?attempt=99")
    assert 'data-attempt="4"' in page("?attempt=x")


def test_a_replica_that_was_never_launched_has_a_page(client: Client, run: Run) -> None:
    ReplicaAttempt.objects.all().delete()
    page = client.get(url("replica", run, 3)).content.decode()
    assert "Not launched yet" in page
    assert "data-log-lines" not in page


def test_what_moves_can_be_had_alone(client: Client, run: Run) -> None:
    part = client.get(url("replica", run, 3) + "?part=1").content.decode()
    assert part.lstrip().startswith('<div class="run-title" ')
    assert "<html" not in part


def test_words_of_backends_are_text(client: Client, run: Run) -> None:
    ReplicaAttempt.objects.filter(replica__number=3, number=1).update(
        message="<script>x</script>", handle={"data": {"<b>": "<i>"}}
    )
    page = client.get(url("replica", run, 3)).content.decode()
    assert "<script>x" not in page
    assert "<b>:" not in page
    assert "<i>" not in page


@pytest.mark.parametrize("number", [99, 10**30])
def test_a_replica_that_is_not_there_is_a_404(client: Client, run: Run, number: int) -> None:
    assert client.get(url("replica", run, number)).status_code == 404
    assert client.get(url("replica-log", run, number) + "?attempt=1").status_code == 404
    assert client.post(url("replica-stop", run, number)).status_code == 404


def test_a_replica_of_another_run_is_not_this_run_s(client: Client, run: Run) -> None:
    other = seed.run(seed.user("olga", "operator"), committed=0, replicas=1)
    assert client.get(url("replica", other, 3)).status_code == 404


@pytest.mark.parametrize("attempts", [1, 30])
def test_the_cost_of_the_page_does_not_grow(
    client: Client, run: Run, attempts: int, django_assert_num_queries: Any
) -> None:
    replica = run.replicas.get(number=3)
    replica.attempts.all().delete()
    seed_fleet.attempts(
        replica, backend="modal", price=1.0, earlier=attempts - 1, now=run.created_at
    )
    # Session, user, role twice (to look, to act), the run, the replica, its jobs, its attempts, and
    # the role that the menu names; rounds, its part in them twice, its last words twice; the state
    # of ingest, and quarantined records.
    with django_assert_num_queries(16):
        client.get(url("replica", run, 3))


# Its log.


def test_log_lines_are_followed_from_a_position(client: Client, run: Run, modal: Stub) -> None:
    modal.lines = ["a", "b"]
    address = url("replica-log", run, 3)
    body = client.get(address, {"attempt": 4}).json()
    assert body == {
        "lines": ["a", "b"], "position": "2", "cut": False, "unknown": "", "ended": False,
    }  # fmt: skip
    modal.lines.append("c")
    assert client.get(address, {"attempt": 4, "after": "2"}).json()["lines"] == ["c"]
    assert client.get(address, {"attempt": 1}).json()["ended"] is True


def test_a_backend_that_cannot_say_is_unknown_and_no_error_page(
    client: Client, run: Run, modal: Stub
) -> None:
    modal.error = NeedsPerson("the token has expired")
    answer = client.get(url("replica-log", run, 3), {"attempt": 4})
    assert answer.status_code == 200
    assert answer.json()["unknown"] == "the token has expired"


@pytest.mark.parametrize(("attempt", "status"), [("", 400), ("x", 400), ("99", 404)])
def test_no_such_attempt(client: Client, run: Run, attempt: str, status: int) -> None:
    assert client.get(url("replica-log", run, 3), {"attempt": attempt}).status_code == status


# Acting on a replica.


@pytest.mark.parametrize("force", ["", "1"])
def test_stop_lets_it_finish_unless_it_is_forced(client: Client, run: Run, force: str) -> None:
    Replica.objects.filter(run=run, number=3).update(worked_since=run.created_at)
    answer = client.post(url("replica-stop", run, 3), {"force": force})
    assert answer["Location"] == url("replica", run, 3)
    replica = run.replicas.get(number=3)
    assert replica.state == "draining"
    assert replica.cancel_at is not None
    now = Event.objects.filter(replica=replica).latest("id").at
    assert (replica.cancel_at > now) == (force == "")
    event = Event.objects.filter(replica=replica).latest("id")
    assert event.actor is not None
    assert event.actor.get_username() == "olga"


def test_restart_launches_the_same_identity_again(client: Client, run: Run) -> None:
    answer = client.post(url("replica-restart", run, 3), {"from": "run"})
    assert answer["Location"] == url("run", run) + "?tab=replicas"
    assert run.replicas.get(number=3).state == "restarting"
    assert "Replica 3: will be launched again." in said(answer)


def test_what_came_too_late_is_said_and_changes_nothing(client: Client, run: Run) -> None:
    Run.objects.filter(pk=run.pk).update(state="succeeded")
    answer = client.post(url("replica-restart", run, 3))
    assert "succeeded" in said(answer)
    Replica.objects.filter(run=run, number=3).update(state="evicted")
    assert "nothing was left to do" in said(client.post(url("replica-stop", run, 3)))
    assert run.replicas.get(number=3).state == "evicted"


@pytest.mark.parametrize("name", ["replica-stop", "replica-restart"])
def test_acting_needs_a_post(client: Client, run: Run, name: str) -> None:
    assert client.get(url(name, run, 3)).status_code == 405
    assert run.replicas.get(number=3).state == "uploading"


@pytest.mark.parametrize("kind", ["viewer", "stranger"])
def test_who_may_not_changes_nothing(run: Run, kind: str) -> None:
    client = client_for(kind, run.owner)
    pool = run.pools.get(backend="local")
    for address in (url("replica-stop", run, 3), url("replica-restart", run, 3)):
        assert client.post(address, {"force": "1"}).status_code == 403
    assert client.post(url("pool-scale", run, pool.pk), {"count": "9"}).status_code == 403
    assert client.post(url("pool-add", run), row()).status_code == 403
    assert run.replicas.get(number=3).state == "uploading"
    assert run.pools.get(pk=pool.pk).count == 2
    assert run.pools.count() == 5


# Pools.


def test_a_pool_is_scaled(client: Client, run: Run) -> None:
    pool = run.pools.get(backend="local")
    answer = client.post(url("pool-scale", run, pool.pk), {"count": "4"})
    assert answer["Location"] == url("run", run) + "?tab=replicas"
    assert "CPU of this machine: 4 wanted, 2 more." in said(answer)
    assert ReplicaPool.objects.get(pk=pool.pk).replicas.count() == 4


@pytest.mark.parametrize("count", ["", "-1", "x", "1.5", "99999", "9" * 40])
def test_a_count_that_is_none_is_said(client: Client, run: Run, count: str) -> None:
    pool = run.pools.get(backend="local")
    answer = client.post(url("pool-scale", run, pool.pk), {"count": count})
    assert answer.status_code == 302
    assert "was not changed: expected" in said(answer)
    assert ReplicaPool.objects.get(pk=pool.pk).count == 2


def test_the_max_price_of_a_pool_is_changed(client: Client, run: Run) -> None:
    pool = run.pools.get(backend="modal")
    address = url("pool-scale", run, pool.pk)

    def limit() -> float | None:
        return ReplicaPool.objects.get(pk=pool.pk).max_price_usd_h

    answer = client.post(address, {"count": "3", "max_price_usd_h": "4.5"})
    assert "Modal H100: the max price is changed." in said(answer)
    assert limit() == 4.5
    client.post(address, {"count": "3"})  # not said: as it was
    assert limit() == 4.5
    for wrong in ("x", "-1", "nan", "inf"):
        answer = client.post(address, {"count": "3", "max_price_usd_h": wrong})
        assert "was not changed: expected" in said(answer)
        assert limit() == 4.5
    client.post(address, {"count": "3", "max_price_usd_h": ""})
    assert limit() is None


def test_a_pool_of_another_run_is_not_scaled(client: Client, run: Run) -> None:
    other = seed.run(seed.user("oscar", "operator"), committed=0, replicas=1)
    pool = other.pools.get()
    assert client.post(url("pool-scale", run, pool.pk), {"count": "3"}).status_code == 404
    assert ReplicaPool.objects.get(pk=pool.pk).count == 1


def row(**changes: str) -> dict[str, str]:
    """What a browser sends of one local replica more."""
    fields = {
        "backend": "local", "hardware": "local:cpu", "count": "1", "credential": "", "region": "",
        "timeout_s": "", "image": "", "price_usd_h": "",
    }  # fmt: skip
    return {f"pools.0.{name}": value for name, value in (fields | changes).items()}


def test_a_pool_is_added(client: Client, run: Run) -> None:
    answer = client.post(url("pool-add", run), row(count="2"))
    assert answer.status_code == 302, answer.content.decode()
    assert "CPU of this machine added." in said(answer)
    pool = run.pools.latest("id")
    assert (pool.backend, pool.count, pool.replicas.count()) == ("local", 2, 2)
    assert min(pool.replicas.values_list("number", flat=True)) == 10


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        ({"count": "0"}, "count", "greater than or equal to 1"),
        ({"count": "900"}, "backend", "expected at most"),
        ({"hardware": "modal:H100"}, "hardware", "expected hardware of Local processes"),
        ({"backend": "modal", "hardware": "modal:H100"}, "backend", "expected a backend that can"),
    ],
)
def test_what_is_wrong_with_a_pool_stands_at_its_field(
    client: Client, run: Run, change: dict[str, str], field: str, text: str
) -> None:
    answer = client.post(url("pool-add", run), row(**change))
    assert answer.status_code == 422
    page = answer.content.decode()
    found = re.search(rf'data-errors-for="pools\.0\.{field}">(.*?)</ul>', page, re.DOTALL)
    assert found is not None
    assert text in found[1]
    assert run.pools.count() == 5


def test_a_backend_is_asked_before_a_pool_joins(
    client: Client, run: Run, modal: Stub, settings: Any, tmp_path: Path
) -> None:
    settings.LOOPBACK_BACKENDS = frozenset({"modal"})
    modal.error = NeedsPerson("no such token")
    sent = row(backend="modal", hardware="modal:H100")
    answer = client.post(url("pool-add", run), sent)
    assert answer.status_code == 422
    assert "Modal: no such token" in answer.content.decode()
    modal.error = None
    assert client.post(url("pool-add", run), sent).status_code == 302


def test_a_run_that_is_over_takes_no_pool(client: Client, run: Run) -> None:
    Run.objects.filter(pk=run.pk).update(state="succeeded")
    answer = client.post(url("pool-add", run), row())
    assert answer.status_code == 422
    assert "expected a run that is working, found one succeeded" in answer.content.decode()
    page = client.get(url("run", run) + "?tab=replicas").content.decode()
    assert "Add a pool" not in page


# The run page.


def test_the_header_says_what_was_spent_of_what(client: Client, run: Run) -> None:
    page = client.get(url("run", run)).content.decode()
    assert "of $15.00 budget" in page
    ReplicaPool.objects.filter(price_usd_h=None).update(price_usd_h=1.0)
    assert 'data-s="cost">$12.35' in client.get(url("run", run)).content.decode()


@pytest.mark.parametrize("name", ["run", "run-snapshot"])
def test_the_run_page_costs_the_same_for_many_replicas(client: Client, name: str) -> None:
    olga = seed.user("olga", "operator")
    client.force_login(olga)
    asked = []
    for replicas in (10, 60):
        run = seed_fleet.mixed(olga, replicas=replicas, committed=0)
        with CaptureQueriesContext(connection) as queries:
            assert client.get(url(name, run)).status_code == 200
        asked.append(len(queries))
    assert asked[0] == asked[1]
