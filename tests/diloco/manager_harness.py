"""Groups of Managers in one process: each member is a thread, the store is a folder."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from diloco.clock import Clock
from diloco.manager import Manager
from diloco.store.base import LocalStore, Store
from diloco.store.metered import MeteredStore
from tests.diloco.clocks import FastClock

T = TypeVar("T")

PATIENT_S = 1000.0
"""Twenty seconds on :class:`FastClock`, for waits that must not time out."""


class Harness:
    """The store of a group. ``make`` creates a Manager with a clock and timeouts for tests."""

    def __init__(self, root: Path) -> None:
        self.store = MeteredStore(LocalStore(root))
        self.clock: Clock = FastClock()
        self.managers: list[Manager] = []

    def make(self, replica: int | str, *, store: Store | None = None, **keywords: Any) -> Manager:
        given: dict[str, Any] = {
            "load_state_dict": lambda state: None,
            "state_dict": dict,
            "min_replica_size": 1,
            "use_async_quorum": False,
            "replica_id": str(replica),
            "rank": 0,
            "world_size": 1,
            "timeout": timedelta(seconds=PATIENT_S),
            "quorum_timeout": timedelta(seconds=PATIENT_S),
            "heartbeat_interval": timedelta(seconds=0.05),
            "heartbeat_timeout": timedelta(seconds=PATIENT_S),
            "join_timeout": timedelta(seconds=PATIENT_S),
            "coalesce": timedelta(seconds=3600),
            "rendezvous": store or self.store,
            "clock": self.clock,
        }
        manager = Manager(**given | keywords)
        self.managers.append(manager)
        return manager

    def together(self, *members: Callable[[], T]) -> list[T]:
        """Run each function in a thread; return the results in order."""
        with ThreadPoolExecutor(len(members)) as pool:
            futures: list[Future[T]] = [pool.submit(member) for member in members]
            return [future.result(timeout=600) for future in futures]

    def close(self) -> None:
        for manager in self.managers:
            manager.shutdown()


def step(manager: Manager, tensor: Tensor, **how: Any) -> bool:
    manager.start_quorum()
    manager.allreduce(tensor, **how).wait()
    return manager.should_commit()
