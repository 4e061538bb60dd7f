"""Celery beat on a monotonic clock, which ends at the first SIGTERM.

Celery's own scheduler compares wall-clock times: after the clock is set back by an hour, no task is
due for an hour and no run is reconciled. Here an entry is due when its interval has passed on
:func:`time.monotonic`. This requires a schedule of intervals, which ours is; no state is stored. An
entry that was due several times (the machine was suspended) is sent once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import django
from celery import platforms
from celery.apps import beat
from celery.beat import Scheduler


class MonotonicScheduler(Scheduler):  # type: ignore[misc]
    """``monotonic`` is the clock in seconds."""

    monotonic: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, *args: Any, **more: Any) -> None:
        self._due: dict[str, float] = {}
        super().__init__(*args, **more)

    def install_default_entries(self, data: Any) -> None:
        """Add none: Celery's own entry is a crontab that deletes results, and we store none."""

    def tick(self, *_: Any, **__: Any) -> float:
        """Send all tasks that are due. Returns the seconds until the next one is due."""
        for name, entry in self.schedule.items():
            now = self.monotonic()
            due = self._due.setdefault(name, now)
            if due > now:
                continue
            every_s = entry.schedule.run_every.total_seconds()
            self._due[name] = due + every_s if now - due < every_s else now + every_s
            self.apply_entry(entry, producer=self.producer)
        waits = min((self._due[name] for name in self.schedule), default=0.0) - self.monotonic()
        return float(
            min(max(waits, 0.0) if self.schedule else self.max_interval, self.max_interval)
        )


class Beat(beat.Beat):  # type: ignore[misc]
    """The program of beat. It sends tasks by their names, so it does not import them, nor all that
    they need.

    SIGTERM and SIGINT end the process at once: it has nothing to save, and a message is one command
    to the broker. Celery raises SystemExit instead. Python ignores it if the signal arrives in a
    destructor, and beat would then continue without its supervisor.
    """

    def init_loader(self) -> None:
        django.setup()
        self.app.finalize()

    def install_sync_handler(self, service: Any) -> None:
        platforms.signals.update(SIGTERM=_end, SIGINT=_end)


def _end(*_: Any) -> None:
    os._exit(0)
