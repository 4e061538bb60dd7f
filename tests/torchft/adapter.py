"""torchft's own tests, from its wheel, on our Manager.

Their modules take the name ``Manager`` from ``torchft.manager``; :func:`patched` puts ours there.
What their world has besides is handed on: a lighthouse names a group, and so a folder; the fault
injector arms an error on a fake process group, which no call of ours passes through.
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

MODULES = (
    "torchft._test.diloco_trainer",
    "torchft.manager_integ_test",
    "torchft.local_sgd_integ_test",
    "torchft.diloco_regression_test",
)


def adapted(root: Path) -> type[Manager]:
    """Our Manager, with its groups in folders of ``root``."""

    class AdaptedManager(Manager):
        def __init__(self, pg: Any, *arguments: Any, lighthouse_addr: str, **given: Any) -> None:
            folder = root / lighthouse_addr.rpartition(":")[2]
            # torchft's lighthouse, as its tests start it, waits a tenth of a second for stragglers.
            limits = {
                "join_timeout": timedelta(seconds=0.1),
                "heartbeat_interval": timedelta(seconds=0.1),
                "heartbeat_timeout": timedelta(seconds=5),
                "rendezvous": LocalStore(folder),
            }
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
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()
