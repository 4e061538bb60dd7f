"""Run torchft's own tests, from its wheel, with our Manager.

The test modules import ``Manager`` from ``torchft.manager``; :func:`patched` replaces it. The
lighthouse address of a test becomes the folder of a group. torchft's fault injector sets an error
on a fake process group that our Manager does not call, so the adapter raises the error itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from diloco.manager import Manager
from diloco.store.base import LocalStore
from diloco.torchft.work import ManagedWork

PATIENCE = timedelta(minutes=5)
"""The minimum of all timeouts of a Manager: 10 s are too short on a busy machine."""

MODULES = (
    "torchft._test.diloco_trainer",
    "torchft.manager_integ_test",
    "torchft.local_sgd_integ_test",
    "torchft.diloco_regression_test",
)


def adapted(root: Path) -> type[Manager]:
    """Our Manager, with its groups in folders below ``root``."""

    class AdaptedManager(Manager):
        def __init__(self, pg: Any, *arguments: Any, lighthouse_addr: str, **given: Any) -> None:
            folder = root / lighthouse_addr.rpartition(":")[2]
            # torchft's tests start a lighthouse that waits 0.1 s for late replicas. On a busy
            # machine they can take longer, and the tests expect them in the next quorum.
            limits = {
                "join_timeout": timedelta(seconds=3),
                "heartbeat_interval": timedelta(seconds=0.1),
                "heartbeat_timeout": timedelta(seconds=5),
                "rendezvous": LocalStore(folder),
            }
            for name in {"timeout", "quorum_timeout", "connect_timeout"} & given.keys():
                given[name] = max(given[name], PATIENCE)
            super().__init__(pg, *arguments, **limits | given)

        def allreduce(self, *arguments: Any, **given: Any) -> ManagedWork:
            work = super().allreduce(*arguments, **given)
            if getattr(self._pg, "_future_error", None) is not None:
                work.get_future().then(self._injected)
            return work

        def _injected(self, future: Any) -> Tensor:
            error, self._pg._future_error = self._pg._future_error, None
            raise error

    return AdaptedManager


@contextmanager
def patched(root: Path) -> Iterator[None]:
    manager = adapted(root)
    modules = [importlib.import_module(name) for name in MODULES]
    patches = [patch.object(module, "Manager", manager) for module in modules]
    for active in patches:
        active.start()
    try:
        yield
    finally:
        for active in patches:
            active.stop()
