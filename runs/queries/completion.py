"""Completions of the last term of a query: names of fields, then their values.

Values come from the fixed words of a field or from the newest runs. At most three queries.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser

from runs.models import ReplicaPool, Run, Sweep
from runs.permissions import can_view
from runs.queries import fuzzy, listing, search

LIMIT = 8
RECENT = 500
"""Pools and sweeps whose values are offered, the newest."""
HELP: Mapping[str, str] = {
    "state": "state of the run",
    "backend": "backend of a pool",
    "hardware": "hardware of a pool",
    "owner": "user name",
    "name": "part of the name",
    "tag": "one of its tags",
    "sweep": "name of its sweep",
    "id": "id of the run",
    "is": "active, ended, archived or mine",
    "loss": "evaluation loss",
    "train": "training loss",
    "tokens": "trained tokens",
    "speed": "tokens per second",
    "rounds": "committed rounds",
    "cost": "US dollars",
    "rate": "US dollars an hour",
    "replicas": "replicas of all pools",
    "age": "since it was created, e.g. age<2d",
}
_TERM = re.compile(r'(?:[^\s"]|"[^"]*(?:"|$))+')
_WITH_VALUE = re.compile(
    r'(-?)([A-Za-z_]+):((?:(?:[^,"]|"[^"]*")+,)*)"?((?:[^,"]|"")*)$', re.DOTALL
)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """``query`` is the text with the last term completed. ``help`` describes a field; ``runs`` is
    how many of the newest runs have the value, if it was counted."""

    label: str
    query: str
    help: str = ""
    runs: int | None = None


def completions(
    user: AbstractBaseUser | AnonymousUser, text: str, *, limit: int = LIMIT
) -> list[Completion]:
    """Completions of the text up to the cursor, the best first."""
    if not can_view(user) or len(text) > search.LONGEST or "\x00" in text:
        return []
    last = [term.start() for term in _TERM.finditer(text) if term.end() == len(text)]
    first = last[-1] if last else len(text)
    before, term = text[:first], text[first:]
    value = _WITH_VALUE.fullmatch(term)
    if value is None:
        return _fields(before, term)[:limit]
    minus, name, others, typed = value.groups()
    name, typed = name.lower(), typed.replace('""', '"')
    start = f"{before}{minus}{name}:{others}"
    return [
        Completion(label=label, query=f"{start}{search.quoted(label)} ", runs=runs)
        for label, runs in _matching(typed, _values(user, name))
    ][:limit]


def _fields(before: str, term: str) -> list[Completion]:
    minus, word = ("-", term[1:]) if term.startswith("-") else ("", term)
    word = word.lower()
    names = [name for name in search.FIELDS if name.startswith(word)]
    if (
        not names
        and len(word) > 2
        and word.isalpha()
        and (nearest := fuzzy.nearest(word, search.FIELDS))
    ):
        names = [nearest]
    return [
        Completion(
            label=f"{name}{sign}", query=f"{before}{minus}{name}{sign}", help=HELP.get(name, "")
        )
        for name in names
        for sign in ("<" if name in search.NUMBERS else ":",)
    ]


def _values(user: AbstractBaseUser | AnonymousUser, name: str) -> list[tuple[str, int | None]]:
    """Values of a field, the most frequent first; empty if none are offered."""
    if name in search.VALUES:
        return [(value, None) for value in search.VALUES[name]]
    if name in listing.FACETS:
        return [*listing.counted(name, user=user).most_common()]
    if name == "hardware":
        pools = ReplicaPool.objects.order_by("-id").values_list("hardware", flat=True)
        return _once(pools[:RECENT])
    if name == "sweep":
        return _once(Sweep.objects.values_list("name", flat=True)[:RECENT])
    if name == "name":
        return _once(Run.objects.filter(archived_at=None).values_list("name", flat=True)[:RECENT])
    return []


def _once(values: Iterable[Any]) -> list[tuple[str, int | None]]:
    return [(str(value), None) for value in dict.fromkeys(values)]


def _matching(typed: str, values: list[tuple[str, int | None]]) -> list[tuple[str, int | None]]:
    """The values that begin with the text, then those that contain it, then the most similar."""
    word = typed.lower()
    begun = [each for each in values if each[0].lower().startswith(word)]
    inside = [each for each in values if word in each[0].lower() and each not in begun]
    if not begun and not inside and len(word) > 2:
        near = fuzzy.nearest(word, (label.lower() for label, _ in values))
        return [each for each in values if near and each[0].lower() == near]
    return begun + inside
