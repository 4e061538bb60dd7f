"""Jobs: work of the background that all ranks of one replica do together.

A thread of each follower waits for *jobs* on a separate channel, executes them on its slice and
returns the results; the leader executes its part in the thread that sends the job. There is one
channel for the exchange and one for checkpoints, so that neither waits for the other. Each rank
opens the store itself, at its first job, so all network connections are used.
"""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from diloco.clock import Clock
from diloco.errors import DamagedObject, ReplicaError
from diloco.exchange.payload_reader import CannotReduce
from diloco.ranks.command_channel import CommandChannel
from diloco.store.base import MissingKey, Store, StoreError
from diloco.store.metered import MeteredStore, StoreUsage
from diloco.store.retry import RetryingStore

log = logging.getLogger(__name__)

IDLE_S = 60.0
"""Seconds without a job after which the leader sends a keep-alive, so that followers do not time
out."""
DEADLINE_S = 60.0
"""For how long a failed request of a follower is retried."""
END_S = 5.0
"""For how long the end of the followers' threads waits for a job in progress, which only a replica
that gives up its work has."""
END, NOTHING = "end", "nothing"

Job = dict[str, Any]


class Work(Protocol):
    """One rank's part of the jobs."""

    def do(self, job: Job) -> Any:
        """Execute a job; return its result as JSON values, None if this rank has no part of it."""
        ...


class JobLeader:
    """The leader's side: sends jobs to all ranks, does its own part, and joins the results."""

    def __init__(self, work: Work, channel: CommandChannel, metered: MeteredStore) -> None:
        self.lock = threading.RLock()
        """Held during a job."""
        self._work = work
        self._channel = channel
        self._metered = metered
        self._ended = threading.Event()
        self._keep_alive = threading.Thread(target=self._stay_connected, daemon=True)
        self._keep_alive.start()

    def run(self, do: str, **arguments: Any) -> list[Any]:
        """Execute a job on all ranks; return the results by rank.

        Raises :class:`CannotReduce`, :class:`DamagedObject`, :class:`MissingKey`,
        :class:`StoreError` or :class:`ReplicaError` for the first rank that fails; the leader's own
        error is raised unchanged.
        """
        job = {"do": do, **arguments}
        with self.lock:
            self._channel.text(json.dumps(job))
            own, error = attempt(self._work, job)
            outcomes = [json.loads(text) for text in self._channel.gather(json.dumps(own))]
        if error is not None:
            raise error
        for rank, outcome in enumerate(outcomes):
            self._metered.add(StoreUsage(*outcome.get("usage", ())))
            _raise(rank, outcome)
        return [outcome["result"] for outcome in outcomes]

    def _stay_connected(self) -> None:
        while not self._ended.wait(IDLE_S):
            with self.lock, suppress(ReplicaError):
                self._channel.text(json.dumps({"do": NOTHING}))

    def stop(self) -> None:
        """Send no more keep-alives."""
        self._ended.set()

    def end(self) -> None:
        """End the followers' threads, unless a job stays in progress."""
        self.stop()
        if not self.lock.acquire(timeout=END_S):
            return
        try:
            with suppress(ReplicaError):
                self._channel.text(json.dumps({"do": END}))
        finally:
            self.lock.release()


def attempt(work: Work, job: Job) -> tuple[Job, Exception | None]:
    """Execute a job; return its outcome for the leader, and the error."""
    try:
        return {"result": work.do(job)}, None
    except CannotReduce as error:
        return {"cannot_reduce": [error.replica, error.reason]}, error
    except DamagedObject as error:
        return {"damaged": str(error)}, error
    except MissingKey as error:
        return {"missing": str(error)}, error
    except StoreError as error:
        return {"store_error": str(error)}, error
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}, error


def _raise(rank: int, outcome: Job) -> None:
    """Raise the error of a rank."""
    if "cannot_reduce" in outcome:
        raise CannotReduce(*outcome["cannot_reduce"])
    if "damaged" in outcome:
        raise DamagedObject(outcome["damaged"])
    if "missing" in outcome:
        raise MissingKey(outcome["missing"])
    if "store_error" in outcome:
        raise StoreError(f"rank {rank}: {outcome['store_error']}")
    if "error" in outcome:
        raise ReplicaError(
            f"another rank of this replica has failed: rank {rank}: {outcome['error']}"
        )


class JobWorker:
    """A follower's thread, which executes the leader's jobs until the leader ends it."""

    def __init__(
        self, work: Work, channel: CommandChannel, usage: Callable[[], StoreUsage]
    ) -> None:
        self._work = work
        self._channel = channel
        self._usage = usage
        self._thread = threading.Thread(target=self._run, name="rank_jobs", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        before = StoreUsage()
        try:
            while (job := json.loads(self._channel.text()))["do"] != END:
                if job["do"] == NOTHING:
                    continue
                outcome, error = attempt(self._work, job)
                if error is not None:
                    log.error("job %s: %s", job["do"], error)
                used = replace(self._usage())
                outcome["usage"] = [
                    used.requests - before.requests,
                    used.bytes_up - before.bytes_up,
                    used.bytes_down - before.bytes_down,
                ]
                before = used
                self._channel.gather(json.dumps(outcome))
        except ReplicaError as error:
            log.warning("the jobs of this rank end: %s", error)


class FollowerStore:
    """Opens the store of a follower at its first job, and counts its requests."""

    def __init__(self, open_store: Callable[[], Store], clock: Clock) -> None:
        self._open_store = open_store
        self._clock = clock
        self._metered: MeteredStore | None = None

    def open(self) -> Store:
        """Open the store; requests are retried."""
        self._metered = MeteredStore(self._open_store())
        return RetryingStore(
            self._metered, clock=self._clock, rng=random.Random(), deadline_s=DEADLINE_S
        )

    def usage(self) -> StoreUsage:
        """Return the requests and bytes so far."""
        return self._metered.usage if self._metered else StoreUsage()
