"""Find runs and replicas by a few typed characters: the search of every page (Ctrl-K).

The number of queries is constant, and each reads a bounded number of rows.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.db.models import Q, QuerySet

from runs.models import Replica, Run
from runs.permissions import can_view
from runs.queries.fuzzy import score, words_of

LONGEST = 100
"""Characters of a query that are used."""
NEWEST = 1000
"""Newest runs whose names are compared letter by letter if too few contain the words."""
_ID = re.compile(r"[0-9a-f]{4,32}")
_COLUMNS = ("pk", "name", "state", "owner_id", "owner__username", "archived_at")


@dataclass(frozen=True, kw_only=True)
class FoundRun:
    id: uuid.UUID
    name: str
    state: str
    owner_id: int
    owner: str
    archived: bool


@dataclass(frozen=True, kw_only=True)
class FoundReplica:
    run: FoundRun
    number: int
    state: str


def clean(text: str) -> str:
    """The part of a query that is used, without characters that a database cannot store."""
    return text[:LONGEST].replace("\x00", " ").strip()


def find_runs(
    user: AbstractBaseUser | AnonymousUser, words: Sequence[str], *, limit: int
) -> list[FoundRun]:
    """The runs that match all words by name, owner or start of the id, the best first; without
    words the newest. At most two queries beside the role."""
    if not can_view(user):
        return []
    runs = Run.objects.order_by("-created_at", "-id")
    if not words:
        return _read(runs.filter(archived_at=None), limit)
    wanted = Q()
    for word in words:
        each = Q(name__icontains=word) | Q(owner__username__icontains=word)
        if _ID.fullmatch(word.replace("-", "")):
            each |= Q(pk__startswith=word)
        wanted &= each
    found = _read(runs.filter(wanted), 3 * limit)
    if len(found) < limit:
        found = _with_similar(found, _read(runs.filter(archived_at=None), NEWEST), words)
    ranked = sorted(found, key=lambda run: (-_rank(run, words), run.archived))
    return ranked[:limit]


def _read(runs: QuerySet[Run], limit: int) -> list[FoundRun]:
    return [
        FoundRun(id=pk, name=name, state=state, owner_id=owner_id, owner=owner, archived=bool(at))
        for pk, name, state, owner_id, owner, at in runs.values_list(*_COLUMNS)[:limit]
    ]


def _with_similar(
    found: list[FoundRun], newest: list[FoundRun], words: Sequence[str]
) -> list[FoundRun]:
    known = {run.id for run in found}
    similar = (run for run in newest if run.id not in known)
    return found + [run for run in similar if score(list(words), run.name) is not None]


def _rank(run: FoundRun, words: Sequence[str]) -> float:
    by_name = score(list(words), run.name)
    return 2.0 if by_name is None else by_name


def run_of(user: AbstractBaseUser | AnonymousUser, run_id: str) -> FoundRun | None:
    """The run with this id; None if there is none, or the text is no id."""
    try:
        wanted = uuid.UUID(run_id)
    except ValueError:
        return None
    if not can_view(user):
        return None
    return next(iter(_read(Run.objects.filter(pk=wanted), 1)), None)


def find_replicas(runs: Sequence[FoundRun], number: int) -> list[FoundReplica]:
    """The replicas with this number of some runs. One query."""
    if not runs or number > 2**31 - 1:
        return []
    states = dict(
        Replica.objects.filter(run__in=[run.id for run in runs], number=number)
        .order_by()
        .values_list("run_id", "state")
    )
    return [
        FoundReplica(run=run, number=number, state=states[run.id])
        for run in runs
        if run.id in states
    ]


def split(text: str) -> tuple[list[str], int | None]:
    """The words of a query, and the number of a replica if the last word is one: ``five 3``."""
    words = words_of(clean(text))
    number = None
    if words and re.fullmatch(r"#?[0-9]{1,9}", words[-1], re.ASCII):
        number = int(words[-1].lstrip("#"))
    return words, number
