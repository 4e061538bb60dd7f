"""Suggests a name that no run has, so that the runs of a list have different names."""

from __future__ import annotations

import re
from collections.abc import Collection

from runs.models import Run

NAME_LENGTH = 80
_SERIES = re.compile(r"(?P<stem>.*?) (?:\(copy(?: (?P<copy>[0-9]{1,6}))?\)|(?P<number>[0-9]{1,6}))")


def suggest(name: str) -> str:
    """``name``, or the next free one of its series: ``Demo 2``, ``Demo (copy 2)``. One query."""
    taken = Run.objects.filter(name__startswith=_stem(name)[: NAME_LENGTH - 15]).order_by()
    return next_free(name, set(taken.values_list("name", flat=True)))


def suggest_copy(name: str) -> str:
    """A name for a clone of the run ``name``; a clone of a clone has one suffix."""
    match = _SERIES.fullmatch(name)
    stem = match["stem"] if match and match["number"] is None else name
    return suggest(_joined(stem, " (copy)"))


def next_free(name: str, taken: Collection[str]) -> str:
    """``name`` if it is not taken, otherwise the first free name after it in its series."""
    if name not in taken:
        return name
    match = _SERIES.fullmatch(name)
    is_copy = match is not None and match["number"] is None
    first = int((match["copy"] or match["number"] or 1) if match else 1) + 1
    for number in range(first, first + len(taken) + 1):
        tail = f" (copy {number})" if is_copy else f" {number}"
        candidate = _joined(_stem(name), tail)
        if candidate not in taken:
            return candidate
    return name


def _stem(name: str) -> str:
    match = _SERIES.fullmatch(name)
    return match["stem"] if match else name


def _joined(stem: str, tail: str) -> str:
    return stem[: NAME_LENGTH - len(tail)] + tail
