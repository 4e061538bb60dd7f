"""Circuit breakers of stores and backend accounts, shared by all worker processes.

A *place* is a store or a backend account. A place that does not respond blocks a worker process for
the timeout of a call. After a failure its breaker is open: no process calls it for
:func:`open_for_s`. Then it is half-open: one process tries, and a success closes it. A dead place
thus costs one process a few seconds per minute, whatever the number of its runs, and runs of other
places do not wait.

At most :data:`SLOTS` processes use a place at once (:func:`slot`), so that a slow place leaves
processes for others. A third process waits briefly for a slot, and gives up if the others are slow.

The state is in Redis; without Redis every breaker is closed. Comparisons of times tolerate a clock
that is set back.
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
from runs.backends.redis_lock import release, take
from runs.models import Credential, EvaluationPlan, ReplicaPool, Run

OPEN_S = 5.0
OPEN_CAP_S = 60.0
SLOTS = 2
"""Processes that can use one place at once; there are more ingest processes than this."""
QUICK_S = 1.0
"""A process that has used a place for longer counts as slow."""
RETRY_S = 0.02
SLOT_S = 90.0
"""Time after which the slot of a killed process is free again: longer than most tasks."""
KEPT_S = 3600


@dataclass(frozen=True, kw_only=True)
class PlaceState:
    """State of one breaker; ``failures`` are consecutive."""

    failures: int = 0
    failed_at: float = 0.0
    """Wall clock, in seconds."""
    message: str = ""

    def is_open(self, now: float) -> bool:
        return self.failures > 0 and 0.0 <= now - self.failed_at < open_for_s(self.failures)


def open_for_s(failures: int) -> float:
    """How long a breaker is open after consecutive failures, in seconds."""
    return float(min(OPEN_S * 2 ** (max(failures, 1) - 1), OPEN_CAP_S)) if failures else 0.0


def store_place(run: Run) -> str:
    """Place of a run's store: scheme, bucket (or parent folder) and credential."""
    scheme, _, rest = run.rendezvous.partition("://")
    where = (
        rest.split("/", 1)[0] if scheme != "file" and rest else run.rendezvous.rpartition("/")[0]
    )
    return f"store:{scheme}:{where}:{run.store_credential_id or ''}"


def store_place_of(run_id: str) -> str | None:
    """Place of a run's store; None if the run does not exist."""
    run = Run.objects.filter(pk=run_id).first()
    return None if run is None else store_place(run)


def prefix_place(run_id: str) -> str:
    """Place of one run's prefix. It opens while listings of the prefix are too long, which delays
    passes of that run only."""
    return f"prefix:{run_id}"


def account_place(pool: ReplicaPool | EvaluationPlan) -> str:
    """Place of the backend account of a pool, or of the jobs of a plan: backend and credential."""
    return f"backend:{pool.backend}:{pool.credential_id or ''}"


def place_of(backend: str, credential: Credential | None) -> str:
    """:func:`account_place` of the pools with this backend and credential."""
    return f"backend:{backend}:{credential.pk if credential else ''}"


def state_of(place: str) -> PlaceState:
    """The state of a place; without failures if Redis is unavailable."""
    with contextlib.suppress(redis.RedisError, OSError, ValueError, TypeError):
        stored: Any = live_stream.client().get(_key(place))
        if stored is not None:
            return PlaceState(**json.loads(stored))
    return PlaceState()


def is_open(place: str) -> bool:
    """Whether the breaker of a place is open: no process calls it now."""
    return state_of(place).is_open(time.time())


def failed(place: str, message: str) -> None:
    """Count an unanswered call.

    Calls that began before the breaker opened count once, because they fail together.
    """
    before, now = state_of(place), time.time()
    if before.is_open(now):
        return
    state = PlaceState(failures=min(before.failures + 1, 20), failed_at=now, message=message[:500])
    with contextlib.suppress(redis.RedisError, OSError):
        live_stream.client().set(_key(place), json.dumps(vars(state)), ex=KEPT_S)


def answered(place: str) -> None:
    """Close the breaker: a call got an answer."""
    with contextlib.suppress(redis.RedisError, OSError):
        live_stream.client().delete(_key(place))


@contextlib.contextmanager
def slot(place: str, *, longest_s: float = SLOT_S) -> Iterator[bool]:
    """Use a place for at most ``longest_s``; yields whether this process can use it now.

    False if the breaker is open, if another process tries a half-open place, or if all slots are
    taken.
    """
    state = state_of(place)
    if state.is_open(time.time()):
        yield False
        return
    taken = _take(place, 1, longest_s) if state.failures else _take_soon(place, longest_s)
    try:
        yield taken is not None
    finally:
        if taken:
            with contextlib.suppress(redis.RedisError, OSError):
                release(live_stream.client(), *taken)


_Taken = tuple[str, str] | tuple[()]
"""Key and value of a slot; () without Redis."""


def _take_soon(place: str, longest_s: float) -> _Taken | None:
    """Take a slot, waiting for processes that began a moment ago."""
    while (taken := _take(place, SLOTS, longest_s)) is None:
        if not any(0.0 <= time.time() - since < QUICK_S for since in _holders(place)):
            return None
        time.sleep(RETRY_S)
    return taken


def _take(place: str, slots: int, longest_s: float) -> _Taken | None:
    """Take a free slot; None if all are taken."""
    for number in range(slots):
        key, now = _slot(place, number), str(time.time())
        try:
            if take(live_stream.client(), key, now, longest_s):
                return key, now
        except (redis.RedisError, OSError):
            return ()
    return None


def _holders(place: str) -> list[float]:
    """Start times of the processes that use a place."""
    with contextlib.suppress(redis.RedisError, OSError, ValueError):
        starts: Any = live_stream.client().mget([_slot(place, number) for number in range(SLOTS)])
        return [float(since) for since in starts if since is not None]
    return []


def _slot(place: str, number: int) -> str:
    return f"{_key(place)}:slot:{number}"


def _key(place: str) -> str:
    return f"archipelago:place:{hashlib.sha256(place.encode()).hexdigest()[:24]}"
