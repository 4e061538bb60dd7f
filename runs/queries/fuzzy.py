"""Fuzzy matching of a few typed words with names: pure functions."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

SHORTEST = 3
"""Letters of a word that can be spread over a name; fewer would match almost any."""
_PREFIX, _START, _INSIDE, _SPREAD = 8.0, 6.0, 3.0, 1.0


def words_of(text: str, *, limit: int = 8) -> list[str]:
    """The words of a query in lower case."""
    return text.lower().split()[:limit]


def score(words: list[str], name: str) -> float | None:
    """How well a name matches all words, higher is better; None if one does not match.

    A word matches at the start of the name, at the start of a word of it, inside it, or with its
    letters in this order, e.g. ``fvbk`` in ``Five backends``. Shorter names are better.
    """
    name = name.lower()
    total = 0.0
    for word in words:
        points = _points(word, name)
        if points is None:
            return None
        total += points
    return total - min(len(name), 200) / 200


def _points(word: str, name: str) -> float | None:
    if name.startswith(word):
        return _PREFIX
    at = name.find(word)
    if at > 0:
        is_start = re.search(rf"(?:^|[^a-z0-9]){re.escape(word)}", name) is not None
        return _START if is_start else _INSIDE
    if len(word) < SHORTEST:
        return None
    letters = iter(name)
    return _SPREAD if all(letter in letters for letter in word) else None


def nearest(word: str, names: Iterable[str]) -> str:
    """The name that looks most like a misspelt word; '' if none does."""
    known = list(names)
    begun = [name for name in known if len(word) > 1 and name.startswith(word)]
    return next(iter(begun or difflib.get_close_matches(word, known, n=1, cutoff=0.6)), "")
