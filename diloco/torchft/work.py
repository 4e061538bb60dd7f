"""The ``Work`` that ``Manager.allreduce`` returns; its callbacks run in ``wait()``.

``get_future().then(callback)`` only records the callback. ``wait()`` first writes the result to the
tensor and then runs all callbacks in the caller's thread, in the order of registration. From then
on each future of the chain has ``_fut``, a completed ``torch.futures.Future``. After a failed
reduce, the callbacks run on the unchanged tensor; the step will not be committed.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Callback = Callable[[Any], Any]


class LazyFuture(torch.futures.Future[Any]):
    """A future in the chain of callbacks of a Work."""

    def __init__(self, work: ManagedWork) -> None:
        super().__init__()
        self._work = work
        self._followers: list[tuple[Callback, LazyFuture]] = []
        self._fut: torch.futures.Future[Any] | None = None

    def then(self, callback: Callback) -> LazyFuture:
        follower = LazyFuture(self._work)
        self._followers.append((callback, follower))
        self._work.tail = follower
        if self._fut is not None:
            self._work.run(callback, follower, self._fut)
        return follower

    def add_done_callback(self, callback: Callback) -> None:
        self.then(callback)

    def wait(self) -> Any:
        self._work.wait()
        return self.value()

    def value(self) -> Any:
        if self._fut is None:
            raise RuntimeError("expected wait() before value(), found a future that is not done")
        return self._fut.value()

    def done(self) -> bool:
        return self._fut is not None

    def complete(self, value: Any) -> None:
        self._fut = torch.futures.Future()
        self._fut.set_result(value)
        for callback, follower in self._followers:
            self._work.run(callback, follower, self._fut)


class ManagedWork(dist._Work):  # type: ignore[name-defined, misc]
    """A Work over ``tensor``. ``finish(timeout_s)`` writes the result to it; ``report`` receives
    every exception."""

    def __init__(
        self,
        tensor: Tensor,
        finish: Callable[[float | None], None],
        report: Callable[[Exception], None],
    ) -> None:
        super().__init__()
        self._tensor = tensor
        self._finish = finish
        self._report = report
        self._finished = False
        self._failed = False
        self._head = LazyFuture(self)
        self.tail = self._head

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result; return False if the reduce or a callback failed (and was
        reported)."""
        if not self._finished:
            self._finished = True
            try:
                self._finish(timeout.total_seconds() if timeout else None)
            except Exception as error:
                self._fail(error)
            self._head.complete(self._tensor)
        return not self._failed

    def run(
        self, callback: Callback, follower: LazyFuture, done: torch.futures.Future[Any]
    ) -> None:
        try:
            value = callback(done)
        except Exception as error:
            self._fail(error)
            value = self._tensor
        follower.complete(value)

    def _fail(self, error: Exception) -> None:
        self._failed = True
        self._report(error)

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self, timeout: timedelta | None = None) -> None:
        self.wait(timeout)

    def is_completed(self) -> bool:
        return self._finished

    def get_future(self) -> LazyFuture:
        """Return the last future of the chain of callbacks."""
        return self.tail


def skipped(tensor: Tensor, report: Callable[[Exception], None]) -> ManagedWork:
    """Return a Work for a call that is skipped; it leaves ``tensor`` unchanged."""
    return ManagedWork(tensor, lambda timeout_s: None, report)
