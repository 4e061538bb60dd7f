"""A future with a deadline and a default value, for ``Manager.wrap_future``."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class ExceptionWithTraceback(Exception):
    """A reported error with its stack trace; torchft's name and attributes."""

    def __init__(self, error: Exception) -> None:
        self.original_exception = error
        self.stack_trace = "".join(traceback.format_exception(error))
        super().__init__(f"{error}\n{self.stack_trace}")


def guarded(
    future: torch.futures.Future[T],
    default: T,
    *,
    timeout_s: float,
    report: Callable[[Exception], None],
) -> torch.futures.Future[T]:
    """Return a future with the result of ``future``, or with ``default`` if it fails or takes
    longer than ``timeout_s`` (system clock). Passes the error to ``report``."""
    out: torch.futures.Future[Any] = torch.futures.Future()
    first = threading.Lock()

    def settle(error: Exception | None, value: Any) -> None:
        if not first.acquire(blocking=False):
            return
        timer.cancel()
        if error is not None:
            report(error)
        out.set_result(value)

    def ended(future: torch.futures.Future[T]) -> None:
        try:
            value = future.value()
        except Exception as error:
            settle(error, default)
        else:
            settle(None, value)

    late = TimeoutError(f"future did not complete within {timeout_s:g} s")
    timer = threading.Timer(timeout_s, settle, (late, default))
    timer.daemon = True
    timer.start()
    future.add_done_callback(ended)
    return out
