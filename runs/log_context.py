"""Log context: the run, replica and round that log lines carry.

A task sets the context once (:func:`about`), and every line that our code or a library logs
meanwhile has it. ``dashboard/logging.py`` writes it. Threads of a pool start without a context and
pass ``extra=`` instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType

FIELDS = ("run", "replica", "round")

_about: ContextVar[Mapping[str, str | int]] = ContextVar("about", default=MappingProxyType({}))


@contextlib.contextmanager
def about(
    *, run: str | None = None, replica: int | None = None, round: int | None = None
) -> Iterator[None]:
    """Add these fields to the log lines of the block."""
    given = {"run": run, "replica": replica, "round": round}
    more = {name: value for name, value in given.items() if value is not None}
    token = _about.set(MappingProxyType({**_about.get(), **more}))
    try:
        yield
    finally:
        _about.reset(token)


def current() -> Mapping[str, str | int]:
    return _about.get()
