"""Parses JSON from machines that this process does not control, bounded in size, depth and content.

Every record is parsed here. The standard library's parser accepts more than a database or a page
can handle: ``NaN``, half of a surrogate pair, NUL, a million empty objects in three megabytes,
nesting up to the recursion limit. Callers pass their limits; everything beyond them is a
:class:`ValueError` with a short message.
"""

from __future__ import annotations

import json
import math
import reprlib
from typing import Any

MAX_DEPTH = 32
"""Levels of nesting; the deepest record of the protocol has about ten."""
MAX_CONTAINERS = 100_000
"""Objects and lists per record. Counted in the raw bytes, before parsing: each takes up to two
hundred bytes of memory and can take three bytes of text."""

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60
_repr.maxlevel = 2


def abridged(value: object) -> str:
    """Return a ``repr`` of bounded length for a value of any size."""
    text = _repr.repr(value)
    return text if len(text) <= 200 else text[:199] + "…"


def parse_json(data: bytes | str, *, containers: int = MAX_CONTAINERS) -> Any:
    """Parse JSON; :func:`check_depth` checks the nesting of the result.

    Raises :class:`ValueError` for invalid JSON, and for more than ``containers`` objects and lists.
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
    """Return an upper bound of the objects and lists; braces and brackets within strings count
    too."""
    if isinstance(data, str):
        return data.count("{") + data.count("[")
    return data.count(b"{") + data.count(b"[")


def check_depth(value: Any, where: str, *, depth: int = MAX_DEPTH) -> None:
    """Raise :class:`ValueError` if ``value`` is nested deeper than ``depth``. Not recursive."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        if not level:
            return
        level = [
            item
            for item in level
            for item in (item.values() if isinstance(item, dict) else item)
            if isinstance(item, dict | list)
        ]
    if level:
        raise ValueError(f"{where}: expected at most {depth} levels of nesting, found more")


def check_storable(value: Any, where: str) -> None:
    """Raise :class:`ValueError` for a value that a JSON column of a database rejects: numbers that
    are not finite, NUL, half of a surrogate pair, deep nesting."""
    check_depth(value, where)
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"{where}: expected finite numbers, found {item}")
        elif isinstance(item, str) and not is_storable_text(item):
            raise ValueError(
                f"{where}: expected text without NUL and surrogates, found {abridged(item)}"
            )


def is_storable_text(text: str) -> bool:
    """Return whether every database accepts the text: no NUL, no half of a surrogate pair."""
    if "\x00" in text:
        return False
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)
