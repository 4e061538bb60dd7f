"""What a task is about: the run, replica and round that its log lines carry.

Tasks and reconcilers say it once (:func:`about`); whatever is logged meanwhile, by us or by a
library, can be found by it. ``dashboard/logging.py`` writes it out. A pool's threads start without:
what they log says itself what it is about (``extra=``).
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
    """Inside, log lines carry these too."""
    said = {"run": run, "replica": replica, "round": round}
    more = {name: value for name, value in said.items() if value is not None}
    token = _about.set(MappingProxyType({**_about.get(), **more}))
    try:
        yield
    finally:
        _about.reset(token)


def current() -> Mapping[str, str | int]:
    return _about.get()
