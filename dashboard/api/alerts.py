"""Alerts of all runs, and how far the caller has read them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from django.http import HttpRequest
from ninja import Query, Router
from pydantic import AwareDatetime, BaseModel, Field

from archipelago import frame_rows as shared
from dashboard.api.auth import reader
from dashboard.api.types import NO_NUL, Body, IsoTime, OfOwner, responses
from runs.actions import alert_inbox as actions
from runs.queries import alert_inbox as queries
from runs.queries import keyset
from runs.queries.alert_inbox import AlertFilter

router = Router(tags=["alerts"])


class ReadUntil(Body):
    """``until`` is ``opened_at`` of the newest alert that was seen; by default all alerts are."""

    until: Annotated[AwareDatetime, Field(strict=False), IsoTime] | None = None


class Unread(BaseModel):
    unread: int


@router.get("/alerts", response=responses(shared.Inbox, but=(404, 409, 413)))
def list_all_alerts(
    request: HttpRequest,
    firing: Annotated[bool, Query(description="Only open alerts")] = False,
    kind: Annotated[str, Query(max_length=24, pattern=NO_NUL)] = "",
    run: Annotated[UUID | None, Query(description="Only of this run")] = None,
    owner: OfOwner = "",
    before: Annotated[
        str | None, Query(pattern=keyset.ID_PLACE, description="`next` of the previous page")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = queries.PAGE,
) -> Any:
    """Alerts of all runs, the newest first, and the number that the caller has not read."""
    user = reader(request)
    chosen = AlertFilter(firing=firing, kind=kind, run=str(run or ""), owner=owner)
    rows, after = queries.page(user, chosen, before=before or "", limit=limit)
    return {
        "alerts": rows,
        "next": after or None,
        "unread": queries.unread(user),
        **queries.counts(user, chosen),
    }


@router.post("/alerts/read", response=responses(Unread, but=(404, 409)))
def mark_alerts_read(request: HttpRequest, body: ReadUntil | None = None) -> Any:
    """Mark alerts as read by the caller. Other users, and the alerts themselves, are unaffected."""
    user = reader(request)
    until: datetime | None = body.until if body else None
    actions.mark_read(user, until=until)
    return {"unread": queries.unread(user)}
