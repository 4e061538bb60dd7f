"""Endpoints for monitoring."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone
from prometheus_client.parser import text_string_to_metric_families

from runs import disk, live_stream
from runs.actions import api_tokens
from runs.backends import health
from runs.models import IngestState, QuarantinedRecord
from tests.browser import seed
from tests.dashboard.page_harness import client_for

pytestmark = pytest.mark.django_db


@pytest.fixture
def broker(valkey: str, settings: Any) -> Any:
    settings.REDIS_URL = valkey
    live_stream.client().delete(health.HEARTBEAT, health.INGEST, health.LAUNCH)
    yield live_stream.client()
    live_stream.client().delete(health.HEARTBEAT, health.INGEST, health.LAUNCH)


def test_healthz_does_not_depend_on_other_services() -> None:
    response = Client().get("/healthz")
    assert (response.status_code, response.content) == (200, b"ok\n")
    assert Client().post("/healthz").status_code == 405


def test_not_ready_without_a_broker() -> None:
    response = Client().get("/readyz")
    assert response.status_code == 503
    assert response.json() == {
        "ready": False,
        "database": "ok",
        "broker": "away",
        "disk": "ok",
        "worker": "unknown",
        "ingest": "unknown",
        "launch": "unknown",
    }


def test_not_ready_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 3_000_000)
    assert Client().get("/readyz").json()["disk"] == "full: 3 MB free"


@pytest.mark.processes
def test_ready_with_a_recent_worker_heartbeat(broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Client().get("/readyz").json()["worker"] == "no heartbeat"
    from runs.tasks import beat_launch, ingest_active, reconcile_active

    reconcile_active()
    assert Client().get("/readyz").json()["ingest"] == "no heartbeat"
    ingest_active()
    assert Client().get("/readyz").json()["launch"] == "no heartbeat"
    assert Client().get("/readyz").status_code == 503
    beat_launch()
    response = Client().get("/readyz")
    assert (response.status_code, response.json()["ready"]) == (200, True)
    written = float(broker.get(health.LAUNCH))
    broker.set(health.LAUNCH, written - health.LAUNCH_STALE_S + 60)
    assert Client().get("/readyz").json()["launch"] == "ok"
    broker.set(health.LAUNCH, written - health.LAUNCH_STALE_S - 1)
    response = Client().get("/readyz")
    assert response.status_code == 503
    assert response.json()["launch"].startswith("silent for 18")
    broker.set(health.HEARTBEAT, float(broker.get(health.HEARTBEAT)) - 100)
    response = Client().get("/readyz")
    assert response.status_code == 503
    assert response.json()["worker"].startswith("silent for 1")
    reconcile_active()
    broker.set(health.INGEST, float(broker.get(health.INGEST)) - 100)
    assert Client().get("/readyz").json()["ingest"].startswith("silent for 1")


def test_beat_ticks_every_queue_that_has_a_worker() -> None:
    from dashboard.celery import CONTROL, DEFAULT, INGEST, app

    ticks = {"reconcile_active": CONTROL, "ingest_active": INGEST, "beat_launch": DEFAULT}
    scheduled = {entry["task"] for entry in app.conf.beat_schedule.values()}
    for name, queue in ticks.items():
        task = f"runs.tasks.{name}"
        assert task in scheduled
        assert app.conf.task_routes.get(task, {"queue": DEFAULT})["queue"] == queue


@pytest.mark.processes
def test_a_heartbeat_from_the_future_is_not_fresh(broker: Any) -> None:
    from runs.tasks import ingest_active, reconcile_active

    reconcile_active()
    ingest_active()
    broker.set(health.HEARTBEAT, float(broker.get(health.HEARTBEAT)) + 3600)
    response = Client().get("/readyz")
    assert response.status_code == 503
    assert "in the future: the clock was set back" in response.json()["worker"]
    assert health.silent_since(), "pages report that no worker is running"


def test_metrics_require_permission() -> None:
    owner = seed.user("owner", "operator")
    assert Client().get("/metrics").status_code == 401
    assert client_for("viewer", owner).get("/metrics").status_code == 200
    for role, expected in (("viewer", 200), ("", 403)):
        _, text = api_tokens.issue(seed.user(f"p{role}", role), name="prometheus", scopes=["read"])
        headers = {"Authorization": f"Bearer {text}"}
        assert Client().get("/metrics", headers=headers).status_code == expected
    assert Client().get("/metrics", headers={"Authorization": "Bearer x"}).status_code == 401


def test_metrics_content() -> None:
    owner = seed.user("owner", "operator")
    run = seed.run(owner, committed=3, replicas=2, name='a "name"\nof two lines')
    seed.run(owner, state="succeeded", committed=20, replicas=2)
    then = timezone.now() - timedelta(seconds=90)
    IngestState.objects.create(run=run, caught_up_at=then, trouble="away", trouble_since=then)
    QuarantinedRecord.objects.create(
        run=run, key="a", first_at=then, last_at=then, quarantined_at=then
    )
    result = numbers(client_for("admin", owner).get("/metrics"))
    assert result["archipelago_runs", ("running",)] == 1
    assert result["archipelago_runs", ("succeeded",)] == 1
    assert result["archipelago_runs", ("failed",)] == 0
    replicas = {k[1]: v for k, v in result.items() if k[0] == "archipelago_replicas"}
    assert sum(replicas.values()) == 2
    assert {backend for backend, _ in replicas} == {"local"}
    assert result["archipelago_tokens_total", ()] == sum(
        type(run).objects.values_list("tokens", flat=True)
    )
    assert result["archipelago_rounds_total", ()] == 23
    assert result["archipelago_bytes_total", ("up",)] == 23 * 2 * 1_950_000
    assert result["archipelago_telemetry_age_seconds", ()] >= 0
    assert result["archipelago_ingest_lag_seconds", ()] == pytest.approx(90.0, abs=30.0)
    assert result["archipelago_run_ingest_lag_seconds", (run.name, str(run.pk))] >= 90.0
    assert result["archipelago_quarantined_records", ()] == 1
    assert result["archipelago_unreadable_runs", ()] == 1
    assert result["archipelago_run_committed_rounds", (run.name, str(run.pk))] == 3
    assert not [k for k in result if k[0] == "archipelago_worker_heartbeat_age_seconds"]


def test_the_number_of_queries_is_constant() -> None:
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    owner = seed.user("owner", "operator")
    client = client_for("admin", owner)
    counts = []
    for runs in (1, 3):
        for _ in range(runs):
            seed.run(owner, committed=1, replicas=2)
        with CaptureQueriesContext(connection) as queries:
            assert client.get("/metrics").status_code == 200
        counts.append(len(queries))
    assert counts[0] == counts[1] <= 14


def numbers(response: Any) -> dict[tuple[str, tuple[str, ...]], float]:
    """(name, values of its labels) -> value."""
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(response.content.decode())
        for sample in family.samples
    }


def test_readyz_503_is_not_logged_as_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Probes poll every few seconds, and the response has the reason."""
    monkeypatch.setattr("dashboard.views.health.health.readiness", lambda: {"worker": "none"})
    assert Client().get("/readyz").status_code == 503
    assert [record for record in caplog.records if record.name.startswith("django.request")] == []
