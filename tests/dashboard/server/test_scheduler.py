"""Beat uses a monotonic clock."""

from __future__ import annotations

import datetime
import os
import signal
from typing import Any

import pytest

from dashboard.celery import app
from dashboard.server.scheduler import Beat, MonotonicScheduler


class Ticker(MonotonicScheduler):
    """Records what it would send."""

    def __init__(self) -> None:
        self.at = 100.0
        self.sent: list[str] = []
        self.monotonic = lambda: self.at
        super().__init__(app=app)

    @property
    def producer(self) -> None:  # type: ignore[override]
        return None

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        self.sent.append(entry.name)

    def run_for(self, seconds: float) -> None:
        until = self.at + seconds
        while self.at < until:
            self.at += max(self.tick(), 0.001)


def test_every_entry_is_sent_at_its_interval() -> None:
    ticker = Ticker()
    ticker.run_for(30.0)
    counts = {name: ticker.sent.count(name) for name in app.conf.beat_schedule}
    assert counts["reconcile"] == counts["ingest"] == 30
    assert (counts["webhooks"], counts["reap"], counts["uploads"]) == (3, 1, 1)


@pytest.mark.parametrize("hours", [-1, 1])
def test_ticks_continue_when_the_wall_clock_changes(
    monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    ticker = Ticker()
    ticker.run_for(5.0)
    ticker.sent.clear()
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=hours)
    monkeypatch.setattr(type(app), "now", lambda self: now)
    ticker.run_for(20.0)
    assert ticker.sent.count("reconcile") == 20
    assert ticker.sent.count("webhooks") == 2


def test_after_a_suspend_each_task_is_sent_once() -> None:
    ticker = Ticker()
    ticker.run_for(5.0)
    ticker.sent.clear()
    ticker.at += 3600.0
    ticker.tick()
    assert ticker.sent.count("reconcile") == 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_arrives_in_a_destructor_ends_beat(
    signum: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}

    class Destroyed:
        def __del__(self) -> None:
            signal.raise_signal(signum)

    try:
        Beat(app=app, quiet=True).install_sync_handler(None)
        Destroyed()
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    assert codes == [0]
