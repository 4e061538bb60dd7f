"""Runs: list, submit, plan, show, and the information for clients of the group."""

from __future__ import annotations

import dataclasses
import secrets
from functools import partial
from typing import Annotated, Any, Literal

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils import timezone
from ninja import Header, Query, Router, Status
from pydantic import BaseModel, Field

from archipelago import rows as shared
from dashboard.api import rows
from dashboard.api.auth import OPERATORS, reader, run_to_see, submitter
from dashboard.api.document import RunDocument, draft_of
from dashboard.api.parser import TOML, YAML
from dashboard.api.problems import FieldProblem, Invalid, at
from dashboard.api.types import NO_NUL, OfOwner, OnBackend, RunId, SearchQuery, responses
from dashboard.presentation.estimate import estimate
from runs import permissions
from runs.actions.group_info import info_of
from runs.json_values import texts
from runs.models import Run
from runs.queries import fleet, keyset, paging, search, selectors
from runs.queries.totals import totals as totals_of
from runs.states import RunState
from runs.submit import create, preflight, throughput_history

router = Router(tags=["runs"])

_AS_TEXT: dict[str, Any] = {
    "requestBody": {
        "content": {kind: {"schema": {"type": "string"}} for kind in (TOML, YAML)},
        "required": True,
    }
}
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=create.SUBMIT_KEY_LENGTH,
        pattern=r"^[\x21-\x7e]*$",
        description="The same key never creates a second run",
    ),
]


class Plan(BaseModel):
    """``problems`` are the reasons for which a submit would be rejected."""

    estimate: rows.Estimate
    problems: list[FieldProblem] = Field(default_factory=list)


@router.get("/runs", response=responses(shared.RunPage, but=(404, 409, 413)))
def list_runs(
    request: HttpRequest,
    state: Annotated[list[Literal[tuple(RunState.values)]], Query()] = [],  # type: ignore[valid-type]  # noqa: B006
    owner: OfOwner = "",
    backend: OnBackend = "",
    name: Annotated[str, Query(max_length=80, pattern=NO_NUL, description="Substring")] = "",
    q: SearchQuery = "",
    before: Annotated[
        str | None, Query(pattern=keyset.UUID_PLACE, description="`next` of the previous page")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    totals: Annotated[bool, Query(description="Also the totals of all matching runs")] = False,
) -> Any:
    """One page of runs, newest first. Archived runs are left out unless ``q`` includes them."""
    user, terms = reader(request), search.parse(q)
    chosen = paging.RunFilter(states=state, owner=owner, backend=backend, name=name)
    matching = search.matching(selectors.visible_runs(user), terms, user=user)
    found = selectors.with_header(chosen.of(matching))
    page, more = keyset.page(found, "created_at", before=before or "", limit=limit)
    return {
        "runs": [selectors.run_header(run) for run in page],
        "next": more or None,
        "totals": dataclasses.asdict(totals_of(chosen.of(matching), now=timezone.now()))
        if totals
        else None,
    }


@router.post(
    "/runs",
    auth=OPERATORS,
    response=responses(shared.Run, status=201, but=(404,)) | {200: shared.Run},
    openapi_extra=_AS_TEXT,
)
def submit_run(
    request: HttpRequest,
    response: HttpResponse,
    document: RunDocument,
    idempotency_key: IdempotencyKey = None,
) -> Any:
    """Create a run from a document, JSON, TOML or YAML, and launch it.

    The document is validated as in the form: backends, bucket and data are checked first. The same
    document with the same ``Idempotency-Key`` returns the first run with status 200; another
    document with that key is rejected.
    """
    user = submitter(request)
    key = idempotency_key or secrets.token_urlsafe(24)
    again = create.is_submitted(Run, key)
    draft = draft_of(document)
    require = partial(preflight.require, over_budget=document.over_budget)
    run = create.create_run(draft, owner=user, submit_key=key, preflight=require)
    if field := create.differing_field(run, draft):
        raise Invalid([at("submit_key", other_document(f"run {run.pk}", field))])
    response["Location"] = reverse("api:get_run", args=[run.pk])
    return Status(200 if again else 201, _detail(request, run))


def other_document(known: str, field: str) -> str:
    """The message about a key that was sent with another document."""
    return (
        f"expected the document of the earlier request with this Idempotency-Key ({known}), found "
        f"another {field}. Use a new key"
    )


@router.post(
    "/plan", auth=OPERATORS, response=responses(Plan, but=(404, 409)), openapi_extra=_AS_TEXT
)
def plan_run(
    request: HttpRequest,
    document: RunDocument,
    ask: Annotated[bool, Query(description="Also check backends, bucket and data")] = True,
) -> Any:
    """A dry run: traffic, tokens and cost of the document, and the reasons for which a submit would
    be rejected. Nothing is stored or started."""
    user = submitter(request)
    draft = draft_of(document)
    result = dataclasses.asdict(
        estimate(draft, throughput_history.known_rates(draft.workload.to_dict()))
    )
    del result["effective_json"]
    problems = preflight.check(draft, user, over_budget=document.over_budget, remote=ask)
    return {"estimate": result, "problems": [at(each.field, each.message) for each in problems]}


@router.get(
    "/runs/{uuid:run_id}", response=responses(shared.Run, but=(409, 413)), url_name="get_run"
)
def get_run(request: HttpRequest, run_id: RunId) -> Any:
    """One run, with its settings and pools."""
    return _detail(request, run_to_see(request, run_id))


@router.get("/runs/{uuid:run_id}/info", response=responses(rows.Info, but=(409, 413)))
def get_info(request: HttpRequest, run_id: RunId) -> Any:
    """``group.json`` and the settings that a client of the group must match. The server is the
    authority: a client with other settings has to stop."""
    return info_of(run_to_see(request, run_id))


def _detail(request: HttpRequest, run: Run) -> dict[str, Any]:
    return selectors.run_header(run) | {
        "rendezvous": run.rendezvous,
        "settings": run.group_settings,
        "workload": run.workload,
        "fingerprint": run.group_fingerprint or None,
        "code": run.code_sha256 or None,
        "time_limit_s": run.time_limit_s,
        "start_timeout_s": run.start_timeout_s,
        "max_restarts": run.max_restarts,
        "store_credential": run.store_credential.name if run.store_credential else None,
        "notes": run.notes,
        "tags": texts(run.tags),
        "archived": run.archived_at is not None,
        "can_operate": permissions.can_operate(request.user, run),
        "pools": fleet.pool_rows(run),
    }
