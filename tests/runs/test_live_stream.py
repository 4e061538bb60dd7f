"""The live stream: a convenience that never fails anybody."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from runs import live_stream


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_stream, "_down", False)


def test_redis_away_is_said_once_and_raises_nothing(
    up: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="runs.live_stream"):
        live_stream.publish("run", {"run": {}})
        live_stream.publish("run", {"run": {}})
        assert live_stream.latest_id() == ""
    assert [r.getMessage()[:21] for r in caplog.records] == ["live updates are off "]


def test_redis_back_is_used_again(
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


def test_a_number_that_json_has_not_is_a_bug_and_not_sent(
    up: None, valkey: str, settings: Any
) -> None:
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
@pytest.mark.parametrize("how", ["killed", "redis away as it told"])
def test_what_a_tick_stored_and_never_told_is_told_by_the_next(
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
    assert not live_stream.client().xread({live_stream.STREAM: before}), "nobody was told"
    tasks.reconcile_run(str(run.pk))
    [[_, entries]] = live_stream.client().xread({live_stream.STREAM: before})
    resyncs = [f for _, f in entries if b"resync" in f]
    assert [f[b"run"].decode() for f in resyncs] == [str(run.pk)]
    after = live_stream.latest_id()
    tasks.reconcile_run(str(run.pk))
    found = live_stream.client().xread({live_stream.STREAM: after}) or []
    assert not [f for _, entries in found for _, f in entries if b"resync" in f], "once is enough"


def test_a_tick_that_fails_for_ever_does_not_have_pages_load_every_second(
    up: None, valkey: str, settings: Any
) -> None:
    settings.REDIS_URL = valkey
    live_stream.client().delete("archipelago:resynced:z", "archipelago:untold:z")
    assert live_stream.begin("z")
    assert not live_stream.begin("z")
    assert live_stream.resync("z")
    assert not live_stream.resync("z")
    assert not live_stream.begin("z"), "kept until it could be told"
    live_stream.told("z")
    assert live_stream.begin("z")


def test_a_delta_that_is_too_large_has_pages_load_a_snapshot(
    up: None, valkey: str, settings: Any
) -> None:
    settings.REDIS_URL = valkey
    before = live_stream.latest_id() or "0-0"
    assert live_stream.publish("large", {"points": ["x" * live_stream.DELTA_BYTES]})
    [[_, entries]] = live_stream.client().xread({live_stream.STREAM: before})
    [(_, fields)] = entries
    assert b"resync" in fields
    assert len(fields[b"data"]) < 10
