"""Boards: save and change.

Their names, owners and sharing are those of :mod:`runs.actions.shared_rows`.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import asdict

from django.contrib.auth.models import User

from runs.actions import shared_rows
from runs.exceptions import InvalidRun
from runs.models import Board
from runs.queries import selectors
from runs.queries.boards import MOST_PANELS, Panel
from runs.queries.comparison import MOST
from runs.queries.search import BadQuery, parse


def save(
    owner: User,
    *,
    name: str,
    runs: Sequence[str] = (),
    query: str = "",
    panels: Sequence[Panel] = (),
    shared: bool = False,
    board: Board | None = None,
) -> Board:
    """Save a new board, or replace the content of ``board``.

    It shows ``runs``, or without any the newest ones that match ``query``. Raises
    :class:`InvalidRun` for an invalid field, and :class:`~runs.exceptions.ActionRefused`.
    """
    board = shared_rows.named(Board, owner, board, name=name, shared=shared)
    board.runs = _checked_runs(owner, runs)
    board.query = _checked_query(query, board.runs)
    board.panels = _checked_panels(panels)
    return shared_rows.store(board)


def _checked_runs(owner: User, runs: Sequence[str]) -> list[str]:
    """Ids in the given order, each once."""
    ids: dict[str, None] = {}
    for text in runs:
        try:
            ids[str(uuid.UUID(text))] = None
        except ValueError:
            raise InvalidRun("runs", f"expected the id of a run, found {text[:64]!r}") from None
    if len(ids) > MOST:
        raise InvalidRun("runs", f"expected at most {MOST} runs, found {len(ids)}")
    visible = selectors.runs_for(owner).filter(pk__in=ids).values_list("pk", flat=True)
    known = {str(pk) for pk in visible}
    if unknown := [text for text in ids if text not in known]:
        raise InvalidRun("runs", f"expected runs of this server, found {unknown[0]}")
    return list(ids)


def _checked_query(query: str, runs: Sequence[str]) -> str:
    query = query.strip()
    if bool(query) == bool(runs):
        found = "both" if query else "neither"
        raise InvalidRun("query", f"expected either a query or runs, found {found}")
    try:
        parse(query)
    except BadQuery as error:
        raise InvalidRun("query", str(error)) from error
    return query


def _checked_panels(panels: Sequence[Panel]) -> list[dict[str, object]]:
    if len(panels) > MOST_PANELS:
        raise InvalidRun("panels", f"expected at most {MOST_PANELS} panels, found {len(panels)}")
    for number, panel in enumerate(panels):
        if problem := panel.problem():
            raise InvalidRun(f"panels.{number}.{problem.field}", problem.message)
    return [asdict(panel) for panel in panels]
