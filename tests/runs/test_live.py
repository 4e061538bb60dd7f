"""The live stream: a convenience that never fails anybody."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from runs import live


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_down", False)


def test_redis_away_is_said_once_and_raises_nothing(
    up: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="runs.live"):
        live.publish("run", {"run": {}})
        live.publish("run", {"run": {}})
        assert live.latest_id() == ""
    assert [r.getMessage()[:21] for r in caplog.records] == ["live updates are off "]


def test_redis_back_is_used_again(
    up: None, valkey: str, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    live.publish("run", {})
    settings.REDIS_URL = valkey
    live.publish("run", {})
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="runs.live"):
        live.publish("run", {})
    assert len(caplog.records) == 1


def test_a_delta_arrives(up: None, valkey: str, settings: Any) -> None:
    settings.REDIS_URL = valkey
    delta = {"run": {"id": "a", "name": "Größe"}, "points": [{"value": [1.5, None]}]}
    before = live.latest_id() or "0-0"
    live.publish("a", delta)
    [[_, entries]] = live.client().xread({live.STREAM: before})
    [(entry_id, fields)] = entries
    assert fields[b"run"] == b"a"
    assert json.loads(fields[b"data"]) == delta
    assert live.latest_id() == entry_id.decode() != before


def test_a_number_that_json_has_not_is_a_bug_and_not_sent(
    up: None, valkey: str, settings: Any
) -> None:
    settings.REDIS_URL = valkey
    before = live.latest_id()
    with pytest.raises(ValueError, match="JSON"):
        live.publish("a", {"run": {"loss": float("nan")}})
    assert live.latest_id() == before


@pytest.mark.django_db
def test_a_tick_arrives_as_one_delta(
    up: None, valkey: str, settings: Any, make_run: Any, clock: Any, executor: Any
) -> None:
    from runs.launch import launch_run
    from runs.reconcile import reconcile_run

    settings.REDIS_URL = valkey
    run = make_run()
    launch_run(str(run.pk))
    before = live.latest_id()
    reconcile_run(str(run.pk))
    [[_, entries]] = live.client().xread({live.STREAM: before})
    [(_, fields)] = entries
    delta = json.loads(fields[b"data"])
    assert delta["run"]["state"] == "provisioning"
    assert [e["to_state"] for e in delta["events"]] == ["provisioning", "queued"]
    assert fields[b"run"].decode() == str(run.pk)
