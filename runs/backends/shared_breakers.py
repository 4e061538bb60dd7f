"""A circuit breaker for each store and each backend account, shared by all worker processes.

A place that does not answer holds a worker process for the patience of a call. After a failure it
is *open*: no process calls it for :func:`open_for_s`. Then it is half-open: one process tries, and
a success closes it. So a dead place costs one process a few seconds a minute, whatever the number
of runs that use it, and runs that use other places do not wait.

While a place works, :data:`SLOTS` processes at most use it at the same time (:func:`slot`), so that
a slow one leaves processes to others: a third waits where they are quick, and gives up where they
are not. The state is in Redis; without Redis every place is closed.
Times are compared so that a clock that is set back does not keep a place open.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import redis

from runs import live_stream
from runs.backends.redis_lock import take
from runs.models import ReplicaPool, Run

OPEN_S = 5.0
OPEN_CAP_S = 60.0
SLOTS = 2
"""Processes in one place at once; there are more ingest processes than this."""
QUICK_S = 1.0
"""A process that uses a place for longer is not waited for."""
RETRY_S = 0.02
SLOT_S = 90.0
"""A slot of a process that was killed is free again after this."""
KEPT_S = 3600


@dataclass(frozen=True, kw_only=True)
class PlaceState:
    failures: int = 0
    failed_at: float = 0.0
    """Wall clock, in seconds."""
    message: str = ""

    def is_open(self, now: float) -> bool:
        return self.failures > 0 and 0.0 <= now - self.failed_at < open_for_s(self.failures)


def open_for_s(failures: int) -> float:
    """How long after that many failures in a row."""
    return float(min(OPEN_S * 2 ** (max(failures, 1) - 1), OPEN_CAP_S)) if failures else 0.0


def store_place(run: Run) -> str:
    """Where a run's bucket is: scheme and bucket (or the folder's parent), and the credential."""
    scheme, _, rest = run.rendezvous.partition("://")
    where = (
        rest.split("/", 1)[0] if scheme != "file" and rest else run.rendezvous.rpartition("/")[0]
    )
    return f"store:{scheme}:{where}:{run.store_credential_id or ''}"


def store_place_of(run_id: str) -> str | None:
    """None for a run that is gone."""
    run = Run.objects.filter(pk=run_id).first()
    return None if run is None else store_place(run)


def prefix_place(run_id: str) -> str:
    """A run's own part of its bucket: open while its listings are too long, which holds back the
    passes of that run and of no other."""
    return f"prefix:{run_id}"


def account_place(pool: ReplicaPool) -> str:
    return f"backend:{pool.backend}:{pool.credential_id or ''}"


def state_of(place: str) -> PlaceState:
    with contextlib.suppress(redis.RedisError, OSError, ValueError, TypeError):
        found: Any = live_stream.client().get(_key(place))
        if found is not None:
            return PlaceState(**json.loads(found))
    return PlaceState()


def is_open(place: str) -> bool:
    """Whether the place is left alone now."""
    return state_of(place).is_open(time.time())


def failed(place: str, message: str) -> None:
    """A call got no answer. Calls that had begun before the place was opened count as one: they
    say nothing about whether it answers later."""
    before, now = state_of(place), time.time()
    if before.is_open(now):
        return
    state = PlaceState(failures=min(before.failures + 1, 20), failed_at=now, message=message[:500])
    with contextlib.suppress(redis.RedisError, OSError):
        live_stream.client().set(_key(place), json.dumps(vars(state)), ex=KEPT_S)


def answered(place: str) -> None:
    """A call got an answer."""
    with contextlib.suppress(redis.RedisError, OSError):
        live_stream.client().delete(_key(place))


@contextlib.contextmanager
def slot(place: str) -> Iterator[bool]:
    """True inside if this process uses the place now; False where it is open, where another
    process tries it, or where enough processes use it."""
    state = state_of(place)
    if state.is_open(time.time()):
        yield False
        return
    taken = _take(place, 1) if state.failures else _take_soon(place)
    try:
        yield taken is not None
    finally:
        if taken:
            with contextlib.suppress(redis.RedisError, OSError):
                live_stream.client().delete(taken)


def _take_soon(place: str) -> str | None:
    """As :func:`_take`, after waiting for processes that have begun a moment ago."""
    while (taken := _take(place, SLOTS)) is None:
        if not any(0.0 <= time.time() - since < QUICK_S for since in _holders(place)):
            return None
        time.sleep(RETRY_S)
    return taken


def _take(place: str, slots: int) -> str | None:
    """The key of a free slot, '' without Redis, None where there is none."""
    for number in range(slots):
        key = _slot(place, number)
        try:
            if take(live_stream.client(), key, str(time.time()), SLOT_S):
                return key
        except (redis.RedisError, OSError):
            return ""
    return None


def _holders(place: str) -> list[float]:
    """When the processes that use the place began."""
    with contextlib.suppress(redis.RedisError, OSError, ValueError):
        found: Any = live_stream.client().mget([_slot(place, number) for number in range(SLOTS)])
        return [float(since) for since in found if since is not None]
    return []


def _slot(place: str, number: int) -> str:
    return f"{_key(place)}:slot:{number}"


def _key(place: str) -> str:
    return f"archipelago:place:{hashlib.sha256(place.encode()).hexdigest()[:24]}"
