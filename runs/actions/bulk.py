"""One action on several runs: stop, archive, restore, tag or delete.

Pages and API choose the runs and confirm their number; here each run is checked separately. Runs
that the user cannot change, or whose state does not allow the action, are reported as refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

from django.contrib.auth.models import User

from runs import permissions
from runs.actions import lifecycle, replicas_and_pools
from runs.exceptions import ActionRefused, IllegalTransition
from runs.models import Run
from runs.queries import search, selectors

MOST = 500
"""Runs that one request changes."""
NOT_YOURS = "operators can change only their own runs"

Verb = Literal["stop", "archive", "restore", "tag", "delete"]


@dataclass(frozen=True, kw_only=True)
class BulkAction:
    """``reason`` belongs to stop, ``tags`` to tag, and ``objects`` (also delete the objects in the
    bucket) to delete."""

    verb: Verb
    reason: str = ""
    tags: Sequence[str] = ()
    objects: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result for one run. It is unchanged without a refusal if there was nothing to do."""

    run: Run
    changed: bool = False
    refusal: str = ""


def choose(user: Any, *, ids: Collection[UUID] = (), query: str | None = None) -> list[Run]:
    """The visible runs that have one of the ids or, with ``query``, match it; newest first.

    Raises :class:`runs.queries.search.BadQuery` for an invalid query, and ``ValueError`` if there
    are too many runs.
    """
    visible = selectors.runs_for(user)
    if query is None:
        if not ids:
            return []
        runs = visible.filter(pk__in=ids)
    else:
        runs = search.matching(visible, search.parse(query), user=user)
    chosen = list(runs.order_by("-created_at", "-pk")[: MOST + 1])
    if len(chosen) > MOST:
        raise ValueError(f"expected at most {MOST} runs, found {runs.count()}. Narrow the query")
    return chosen


def operable(user: User, runs: Sequence[Run]) -> list[Run]:
    """The runs that the user can operate, with one query for the role."""
    if permissions.has_role(user, "admin"):
        return list(runs)
    if not permissions.can_submit(user):
        return []
    return [run for run in runs if run.owner_id == user.pk]


def act_on_all(runs: Sequence[Run], action: BulkAction, *, actor: User) -> list[Outcome]:
    """Apply the action to each run that the actor can operate."""
    own = {run.pk for run in operable(actor, runs)}
    return [
        _act(run, action, actor) if run.pk in own else Outcome(run=run, refusal=NOT_YOURS)
        for run in runs
    ]


def _act(run: Run, action: BulkAction, actor: User) -> Outcome:
    try:
        return Outcome(run=run, changed=_change(run, action, actor))
    except (ActionRefused, IllegalTransition) as error:
        return Outcome(run=run, refusal=str(error))
    except Run.DoesNotExist:  # a concurrent deletion has finished
        is_done = action.verb == "delete"
        return Outcome(run=run, changed=is_done, refusal="" if is_done else "it was deleted")


def _change(run: Run, action: BulkAction, actor: User) -> bool:
    match action.verb:
        case "stop":
            return replicas_and_pools.request_stop(run, actor=actor, reason=action.reason)
        case "archive" | "restore":
            return lifecycle.archive(run, actor=actor, archived=action.verb == "archive")
        case "tag":
            return lifecycle.describe(run, more_tags=action.tags, actor=actor)
        case "delete":
            lifecycle.delete(run, actor=actor, name=run.name, objects=action.objects)
            return True
