"""One action on several runs, which a list of ids or a query selects."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from django.http import HttpRequest
from ninja import Router
from pydantic import Field

from archipelago import list_rows as shared
from dashboard.api.auth import OPERATORS, submitter
from dashboard.api.problems import Invalid, at
from dashboard.api.types import NO_NUL, Body, responses
from runs.actions import bulk
from runs.queries import search
from runs.submit.tags import TAG_LENGTH, TAGS

router = Router(tags=["actions"])


class BulkRequest(Body):
    """``count`` is the number of runs that ``ids`` or ``query`` selects, as a confirmation: if it
    differs, nothing is changed. ``reason`` belongs to stop, ``tags`` to tag, and ``objects`` (also
    delete the objects in the bucket) to delete."""

    action: bulk.Verb
    count: Annotated[int, Field(ge=1, le=bulk.MOST)]
    ids: (
        Annotated[
            list[Annotated[UUID, Field(strict=False)]], Field(min_length=1, max_length=bulk.MOST)
        ]
        | None
    ) = None
    query: Annotated[str, Field(max_length=search.LONGEST, pattern=NO_NUL)] | None = None
    reason: Annotated[str, Field(max_length=500, pattern=NO_NUL)] = ""
    tags: Annotated[
        list[Annotated[str, Field(max_length=TAG_LENGTH, pattern=NO_NUL)]],
        Field(max_length=TAGS, default_factory=list),
    ]
    objects: bool = False


@router.post("/runs/bulk", auth=OPERATORS, response=responses(shared.BulkResult, but=(404, 409)))
def act_on_runs(request: HttpRequest, body: BulkRequest) -> Any:
    """Stop, archive, restore, tag or delete up to 500 runs: those with the ids, or all that match
    the query of the list. Stop leaves out ended runs. Each run is checked separately; ``refusal``
    is the reason why it was not changed."""
    user = submitter(request)
    if (body.ids is None) == (body.query is None):
        raise Invalid([at("query", "expected either ids or query")])
    try:
        runs = bulk.choose(user, ids=body.ids or (), query=body.query)
    except ValueError as error:
        raise Invalid([at("query", str(error))]) from error
    if body.action == "stop":
        runs = [run for run in runs if not run.ended]
    if body.count != len(runs):
        selected = "active runs" if body.action == "stop" else "runs"
        message = f"expected {len(runs)}, the number of selected {selected}, found {body.count}"
        raise Invalid([at("count", message)])
    action = bulk.BulkAction(
        verb=body.action, reason=body.reason, tags=body.tags, objects=body.objects
    )
    outcomes = bulk.act_on_all(runs, action, actor=user)
    return {
        "results": [
            {
                "id": str(one.run.pk),
                "name": one.run.name,
                "state": one.run.state,
                "changed": one.changed,
                "refusal": one.refusal,
            }
            for one in outcomes
        ]
    }
