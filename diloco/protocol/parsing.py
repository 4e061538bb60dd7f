"""JSON from machines that this process does not control: bounded in size, depth and content.

Every record is parsed here. The standard library's parser accepts more than a table or a person can
take: ``NaN``, half of a surrogate pair, NUL, a million empty objects in three megabytes, nesting up
to the recursion limit. Callers say what they allow; everything else is a :class:`ValueError` whose
message is short, whatever was found.
"""

from __future__ import annotations

import json
import math
import reprlib
from typing import Any

MAX_DEPTH = 32
"""Levels of nesting. The deepest record of ours has about ten."""
MAX_CONTAINERS = 100_000
"""Objects and lists in one record. Counted in the raw bytes, before anything is built: each takes
up to two hundred bytes of memory and may take three in the text."""

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60
_repr.maxlevel = 2


def abridged(value: object) -> str:
    """``repr`` of a value of any size, of a bounded length."""
    text = _repr.repr(value)
    return text if len(text) <= 200 else text[:199] + "…"


def parse_json(data: bytes | str, *, containers: int = MAX_CONTAINERS) -> Any:
    """The value, which may be nested too deeply for some uses (:func:`check_depth`).

    Raises :class:`ValueError` for anything that is no JSON or has too many objects and lists.
    """
    found = _containers(data)
    if found > containers:
        raise ValueError(f"expected at most {containers} objects and lists, found {found}")
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError(f"expected at most {MAX_DEPTH} levels of nesting, found more") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8, found {error.reason} at byte {error.start}") from None


def _containers(data: bytes | str) -> int:
    """At least as many as there are; braces and brackets inside texts are counted too."""
    if isinstance(data, str):
        return data.count("{") + data.count("[")
    return data.count(b"{") + data.count(b"[")


def check_depth(value: Any, where: str, *, depth: int = MAX_DEPTH) -> None:
    """:class:`ValueError` if ``value`` is nested deeper. Does not recurse."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        if not level:
            return
        level = [
            item
            for one in level
            for item in (one.values() if isinstance(one, dict) else one)
            if isinstance(item, dict | list)
        ]
    if level:
        raise ValueError(f"{where}: expected at most {depth} levels of nesting, found more")


def check_storable(value: Any, where: str) -> None:
    """:class:`ValueError` for what no database column of JSON takes: numbers that are not finite,
    NUL, half of a surrogate pair, deep nesting."""
    check_depth(value, where)
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.keys()
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, float) and not math.isfinite(one):
            raise ValueError(f"{where}: expected finite numbers, found {one}")
        elif isinstance(one, str) and not is_storable_text(one):
            raise ValueError(f"{where}: expected text without NUL and surrogates, found it")


def is_storable_text(text: str) -> bool:
    """Whether every database takes the text: no NUL, no half of a surrogate pair."""
    if "\x00" in text:
        return False
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)
