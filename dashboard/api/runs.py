"""Runs: list, submit, plan, look, and what a client of the group has to know."""

from __future__ import annotations

import dataclasses
import secrets
import uuid
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from ninja import Header, Query, Router, Status
from pydantic import BaseModel, Field

from dashboard.api import rows
from dashboard.api.auth import OPERATORS, reader, run_to_see, submitter
from dashboard.api.document import RunDocument, draft_of
from dashboard.api.info import info_of
from dashboard.api.parser import TOML
from dashboard.api.problems import FieldProblem, Invalid, at
from dashboard.api.types import NO_NUL, RunId, responses
from dashboard.presentation.estimate import estimate
from runs import permissions
from runs.actions import replicas_and_pools
from runs.exceptions import InvalidRun
from runs.json_values import texts
from runs.models import Run
from runs.queries import fleet, paging, search, selectors
from runs.states import RunState
from runs.submit import create, preflight, throughput_history
from runs.submit.run_draft import RunDraft

router = Router(tags=["runs"])

PLACE = r"^[0-9]{1,17}_[0-9a-f]{32}$"
"""Microseconds since 1970, and the id."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_AS_TOML: dict[str, Any] = {
    "requestBody": {"content": {TOML: {"schema": {"type": "string"}}}, "required": True}
}
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=create.SUBMIT_KEY_LENGTH,
        pattern=r"^[\x21-\x7e]*$",
        description="One key makes one run, however often it is sent",
    ),
]


class Plan(BaseModel):
    """``problems`` are what a submit would be refused for."""

    estimate: rows.Estimate
    problems: list[FieldProblem] = Field(default_factory=list)


@router.get("/runs", response=responses(rows.RunPage, but=(404, 409, 413)))
def list_runs(
    request: HttpRequest,
    state: Annotated[list[Literal[tuple(RunState.values)]], Query()] = [],  # type: ignore[valid-type]  # noqa: B006
    owner: Annotated[str, Query(max_length=150, pattern=NO_NUL)] = "",
    backend: Annotated[str, Query(max_length=32, pattern=NO_NUL)] = "",
    name: Annotated[str, Query(max_length=80, pattern=NO_NUL, description="Any part of it")] = "",
    q: Annotated[
        str, Query(max_length=search.LONGEST, pattern=NO_NUL, description="As the list's own box")
    ] = "",
    before: Annotated[
        str | None, Query(pattern=PLACE, description="The page before's ``next``")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Any:
    """Newest first, a page at a time. Archived ones are left out unless ``q`` asks for them."""
    user = reader(request)
    found, more = paging.runs_page(
        search.matching(selectors.runs_for(user), search.parse(q), user=user),
        before=_place(before),
        states=state,
        owner=owner,
        backend=backend,
        name=name,
        limit=limit,
    )
    return {
        "runs": [selectors.run_header(run) for run in found],
        "next": _place_text(more) if more else None,
    }


@router.post(
    "/runs",
    auth=OPERATORS,
    response=responses(rows.Run, status=201, but=(404,)) | {200: rows.Run},
    openapi_extra=_AS_TOML,
)
def submit_run(
    request: HttpRequest,
    response: HttpResponse,
    document: RunDocument,
    idempotency_key: IdempotencyKey = None,
) -> Any:
    """Make a run of a document, JSON or TOML, and launch it.

    It is checked as the form checks it: backends, bucket and data are asked first. Sent again with
    the same ``Idempotency-Key`` it answers 200 with the run that was made the first time; with that
    key and another document it is refused.
    """
    user = submitter(request)
    key = idempotency_key or secrets.token_urlsafe(24)
    sent = Run.objects.filter(submit_key=key)
    again = sent.exists()
    draft = draft_of(document)
    # Asked again after the checks, because the other request may have been quicker than they are.
    problems = [] if again else problems_of(draft, user, over_budget=document.over_budget)
    if problems and not sent.exists():
        raise Invalid(problems)
    run = replicas_and_pools.create_run(draft, owner=user, submit_key=key)
    if field := create.differing_field(run, draft):
        message = (
            f"expected the document that this Idempotency-Key submitted before, run {run.pk}, "
            f"found another {field}. Send it with a new key"
        )
        raise Invalid([at("submit_key", message)])
    response["Location"] = reverse("api:get_run", args=[run.pk])
    return Status(200 if again else 201, _detail(request, run))


@router.post(
    "/plan", auth=OPERATORS, response=responses(Plan, but=(404, 409)), openapi_extra=_AS_TOML
)
def plan_run(
    request: HttpRequest,
    document: RunDocument,
    ask: Annotated[bool, Query(description="Ask backends, bucket and data as well")] = True,
) -> Any:
    """A dry run: what the document would move, train and cost, and what it would be refused for.
    Nothing is stored and nothing is started."""
    user = submitter(request)
    draft = draft_of(document)
    found = dataclasses.asdict(
        estimate(draft, throughput_history.known_rates(draft.workload.to_dict()))
    )
    del found["effective_json"]
    problems = problems_of(draft, user, over_budget=document.over_budget, ask=ask)
    return {"estimate": found, "problems": problems}


@router.get("/runs/{uuid:run_id}", response=responses(rows.Run, but=(409, 413)), url_name="get_run")
def get_run(request: HttpRequest, run_id: RunId) -> Any:
    """One run, with settings and pools."""
    return _detail(request, run_to_see(request, run_id))


@router.get("/runs/{uuid:run_id}/info", response=responses(rows.Info, but=(409, 413)))
def get_info(request: HttpRequest, run_id: RunId) -> Any:
    """``group.json`` and what a client of the group has to expect of it. The server is the
    authority: a client that was set up otherwise has to stop."""
    return info_of(run_to_see(request, run_id))


def problems_of(
    draft: RunDraft, user: User, *, over_budget: bool = False, ask: bool = True
) -> list[FieldProblem]:
    """As the form finds them: what is wrong in itself, then what backends and bucket say."""
    try:
        create.check_local(draft, user)
        own = create.check_draft(draft, uuid.uuid4(), viewer=user)
    except InvalidRun as error:
        return [at(error.field, error.message)]
    if not ask:
        return []
    findings = preflight.check_run(
        draft,
        uri=own,
        rates=throughput_history.known_rates(draft.workload.to_dict()),
        over_budget=over_budget,
    )
    return [at(finding.field, finding.message) for finding in findings]


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
        "may_operate": permissions.may_operate(request.user, run),
        "pools": fleet.pool_rows(run),
    }


def _place(text: str | None) -> paging.Place | None:
    if text is None:
        return None
    since, _, pk = text.partition("_")
    return _EPOCH + int(since) * _MICROSECOND, uuid.UUID(hex=pk)


def _place_text(place: paging.Place) -> str:
    at_time, pk = place
    return f"{(at_time - _EPOCH) // _MICROSECOND}_{pk.hex}"
