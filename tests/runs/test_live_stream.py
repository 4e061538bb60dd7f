"""The live stream: optional, so failures of Redis raise nothing."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import redis

from runs import live_stream


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_stream, "_down", False)


def test_unavailable_redis_is_logged_once_and_raises_nothing(
    up: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="runs.live_stream"):
        live_stream.publish("run", {"run": {}})
        live_stream.publish("run", {"run": {}})
        assert live_stream.latest_id() == ""
    assert [r.getMessage()[:21] for r in caplog.records] == ["live updates are off "]


def test_one_page_at_a_time_waits_for_a_redis_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_stream, "_retry_at", {})
    now, asked = 100.0, []

    def hung(client: redis.Redis) -> Any:
        asked.append(now)
        assert len(asked) == 1 or answer() == "timeout", "another page meanwhile"
        raise redis.TimeoutError

    def refusing(client: redis.Redis) -> Any:
        raise redis.ConnectionError

    def answer(request: Any = lambda client: "answer") -> Any:
        try:
            return live_stream.ask(request, clock=lambda: now)
        except redis.TimeoutError:
            return "timeout"
        except redis.ConnectionError:
            return "refused"

    assert answer(hung) == answer(hung) == answer() == "timeout"
    now += live_stream.RETRY_S
    assert answer(hung) == "timeout"
    assert asked == [100.0, 100.0 + live_stream.RETRY_S]
    now += live_stream.RETRY_S
    assert answer() == answer() == "answer"
    assert answer(refusing) == "refused" and answer() == "answer", "it costs no time"


def test_redis_is_used_again_once_available(
    up: None, valkey: str, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    live_stream.publish("run", {})
    settings.REDIS_URL = valkey
    live_stream.publish("run", {})
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="runs.live_stream"):
        live_stream.publish("run", {})
    assert len(caplog.records) == 1


def test_a_delta_arrives(up: None, valkey: str, settings: Any) -> None:
    settings.REDIS_URL = valkey
    delta = {"run": {"id": "a", "name": "Größe"}, "points": [{"value": [1.5, None]}]}
    before = live_stream.latest_id() or "0-0"
    live_stream.publish("a", delta)
    [[_, entries]] = live_stream.client().xread({live_stream.STREAM: before})
    [(entry_id, fields)] = entries
    assert fields[b"run"] == b"a"
    assert json.loads(fields[b"data"]) == delta
    assert live_stream.latest_id() == entry_id.decode() != before


def test_number_that_is_not_finite_is_not_sent(up: None, valkey: str, settings: Any) -> None:
    settings.REDIS_URL = valkey
    before = live_stream.latest_id()
    with pytest.raises(ValueError, match="JSON"):
        live_stream.publish("a", {"run": {"loss": float("nan")}})
    assert live_stream.latest_id() == before


@pytest.mark.django_db
def test_a_tick_arrives_as_one_delta(
    up: None, valkey: str, settings: Any, make_run: Any, clock: Any, executor: Any
) -> None:
    from runs.reconcile.launch import launch_run
    from runs.reconcile.reconciler import reconcile_run

    settings.REDIS_URL = valkey
    run = make_run()
    launch_run(str(run.pk))
    before = live_stream.latest_id()
    reconcile_run(str(run.pk))
    [[_, entries]] = live_stream.client().xread({live_stream.STREAM: before})
    [(_, fields)] = entries
    delta = json.loads(fields[b"data"])
    assert delta["run"]["state"] == "provisioning"
    assert [e["to_state"] for e in delta["events"]] == ["provisioning", "queued"]
    assert fields[b"run"].decode() == str(run.pk)


@pytest.mark.django_db
@pytest.mark.parametrize("how", ["killed", "redis unavailable on publication"])
def test_unpublished_changes_are_published_by_the_next_tick(
    up: None,
    valkey: str,
    settings: Any,
    make_run: Any,
    clock: Any,
    executor: Any,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    from runs import tasks
    from runs.reconcile.launch import launch_run

    class Killed(BaseException):
        pass

    def killed(*args: Any) -> bool:
        raise Killed

    settings.REDIS_URL = valkey
    run = make_run()
    launch_run(str(run.pk))
    before = live_stream.latest_id() or "0-0"
    with monkeypatch.context() as patched:
        if how == "killed":
            patched.setattr("runs.reconcile.reconciler.publish_changes", killed)
            with pytest.raises(Killed):
                tasks.reconcile_run(str(run.pk))
        else:
            patched.setattr(live_stream, "_add", lambda entry: False)
            tasks.reconcile_run(str(run.pk))
    assert not live_stream.client().xread({live_stream.STREAM: before}), "nothing was published"
    tasks.reconcile_run(str(run.pk))
    [[_, entries]] = live_stream.client().xread({live_stream.STREAM: before})
    resyncs = [f for _, f in entries if b"resync" in f]
    assert [f[b"run"].decode() for f in resyncs] == [str(run.pk)]
    after = live_stream.latest_id()
    tasks.reconcile_run(str(run.pk))
    result = live_stream.client().xread({live_stream.STREAM: after}) or []
    assert not [f for _, entries in result for _, f in entries if b"resync" in f], "once is enough"


def test_failing_tick_does_not_reload_pages_every_second(
    up: None, valkey: str, settings: Any
) -> None:
    settings.REDIS_URL = valkey
    live_stream.client().delete("archipelago:resynced:z", "archipelago:pending:z")
    assert live_stream.mark_pending("z")
    assert not live_stream.mark_pending("z")
    assert live_stream.resync("z")
    assert not live_stream.resync("z")
    assert not live_stream.mark_pending("z"), "pending until it is published"
    live_stream.mark_published("z")
    assert live_stream.mark_pending("z")


def test_too_large_delta_makes_pages_reload(up: None, valkey: str, settings: Any) -> None:
    settings.REDIS_URL = valkey
    before = live_stream.latest_id() or "0-0"
    assert live_stream.publish("large", {"points": ["x" * live_stream.DELTA_BYTES]})
    [[_, entries]] = live_stream.client().xread({live_stream.STREAM: before})
    [(_, fields)] = entries
    assert b"resync" in fields
    assert len(fields[b"data"]) < 10
