"""Tasks are enqueued after the commit, and a request survives an unavailable broker."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from django.db import transaction
from kombu.exceptions import OperationalError

from runs import task_queue, tasks
from runs.backends.redis_lock import lease
from runs.exceptions import LaunchLater
from tests.servers import wait_until


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    result: list[tuple[Any, ...]] = []

    def send_task(name: str, *, args: Any, expires: Any, **_: Any) -> None:
        result.append((name, args, expires))

    monkeypatch.setattr(task_queue.current_app, "send_task", send_task)
    return result


@pytest.mark.django_db(transaction=True)
def test_sent_after_the_commit(sent: list[Any]) -> None:
    with transaction.atomic():
        task_queue.enqueue("launch_run", "id", expires=5)
        assert sent == []
    assert sent == [("runs.tasks.launch_run", ("id",), 5)]


@pytest.mark.django_db(transaction=True)
def test_nothing_is_sent_after_a_rollback(sent: list[Any]) -> None:
    with pytest.raises(RuntimeError), transaction.atomic():
        task_queue.enqueue("launch_run", "id")
        raise RuntimeError
    assert sent == []


@pytest.mark.django_db
def test_unavailable_broker_is_only_logged(
    monkeypatch: pytest.MonkeyPatch,
    django_capture_on_commit_callbacks: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def away(*args: Any, **kwargs: Any) -> None:
        raise OperationalError("connection refused")

    monkeypatch.setattr(task_queue.current_app, "send_task", away)
    with (
        caplog.at_level(logging.WARNING, logger="runs.task_queue"),
        django_capture_on_commit_callbacks(execute=True),
    ):
        task_queue.enqueue("launch_run", "id")
    assert "launch_run('id',) was not sent" in caplog.text


@pytest.mark.parametrize(
    "name", ["launch_run", "launch_pool", "reconcile_run", "ingest_run", "write_bucket", "reap"]
)
def test_every_enqueued_name_is_a_task(name: str) -> None:
    assert getattr(tasks, name).name == f"runs.tasks.{name}"


def test_beat_enqueues_every_run_that_needs_control(make_run: Any, outbox: list[Any]) -> None:
    from runs.models import Run

    active, over = make_run(), make_run()
    Run.objects.filter(pk=over.pk).update(state="succeeded")
    over.replicas.update(state="done")
    outbox.clear()
    tasks.reconcile_active()
    assert outbox == [("reconcile_run", str(active.pk))]


def test_ingest_is_enqueued_for_the_same_runs(make_run: Any, outbox: list[Any]) -> None:
    run = make_run()
    outbox.clear()
    tasks.ingest_active()
    assert outbox == [("ingest_run", str(run.pk))]


def test_every_queue_has_a_worker_and_control_has_its_own() -> None:
    from dashboard.celery import app
    from dashboard.server import commands

    def queues(command: list[str]) -> str:
        return command[command.index("--queues") + 1]

    served = {queues(w): w for w in (commands.worker(), commands.control(), commands.ingest())}
    routed = {name: app.amqp.router.route({}, name)["queue"].name for name in app.tasks}
    assert {routed[name] for name in routed if name.startswith("runs.")} == set(served)
    control = {name for name, task_queue in routed.items() if task_queue == "control"}
    names = ("reconcile_active", "reconcile_run", "control_sweep", "evaluate_budgets")
    assert control == {f"runs.tasks.{name}" for name in names}
    for name in ("ingest_active", "ingest_run", "write_bucket"):
        assert routed[f"runs.tasks.{name}"] == "ingest"
    assert not tasks.ingest_run.acks_late, "a pass that was killed is not delivered again"
    assert tasks.ingest_run.time_limit < 110


def test_one_tick_per_run_at_a_time(
    valkey: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.REDIS_URL = valkey
    ticks: list[str] = []
    monkeypatch.setattr("runs.reconcile.reconciler.reconcile_run", ticks.append)
    with lease("reconcile:a") as held:
        assert held
        tasks.reconcile_run("a")
        tasks.reconcile_run("b")
    assert ticks == ["b"]
    tasks.reconcile_run("a")
    assert ticks == ["b", "a"]


def test_deletion_waits_for_a_bucket_write(
    valkey: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that is written during a deletion would remain."""
    settings.REDIS_URL = valkey
    deleted: list[str] = []
    monkeypatch.setattr("runs.actions.deletion.delete_run", deleted.append)
    with lease("write:a") as held:
        assert held
        with pytest.raises(LaunchLater, match="journal"):
            tasks.delete_run("a")
        tasks.delete_run("b")
    assert deleted == ["b"]
    tasks.delete_run("a")
    assert deleted == ["b", "a"]


def test_expired_lease_is_not_released_from_its_next_holder(valkey: str, settings: Any) -> None:
    from runs import live_stream

    settings.REDIS_URL = valkey
    with lease("slow") as held:
        assert held
        live_stream.client().set(
            "archipelago:lease:slow", "another's"
        )  # this lease expired, another process holds the next one
    assert live_stream.client().get("archipelago:lease:slow") == b"another's"


def test_a_lease_is_renewed_as_long_as_it_is_held(valkey: str, settings: Any) -> None:
    from runs import live_stream

    settings.REDIS_URL = valkey
    client, key = live_stream.client(), "archipelago:lease:long"
    with lease("long", ttl_s=10.0) as held:
        assert held
        client.pexpire(key, 3_600_000)  # so that a renewal is visible
        wait_until(lambda: client.pttl(key) <= 10_000, "a renewal")
        assert client.exists(key)
        with lease("long") as another:
            assert not another
    assert not client.exists(key)
