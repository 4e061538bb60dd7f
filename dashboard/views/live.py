"""The streams of the runs list and of one run.

Authenticate, close the database connection, then stream: an idle viewer holds none.
"""

from __future__ import annotations

from typing import Any

from asgiref.sync import sync_to_async
from django.contrib.auth.decorators import login_not_required
from django.db import connections
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.views.decorators.http import require_GET

from dashboard import stream
from runs import selectors


# A browser's EventSource would follow a redirect to the sign-in page; 401 says it plainly.
@login_not_required
@require_GET
async def runs_stream(request: HttpRequest) -> HttpResponse | StreamingHttpResponse:
    return await _respond(request, run_id=None)


@login_not_required
@require_GET
async def run_stream(request: HttpRequest, run_id: Any) -> HttpResponse | StreamingHttpResponse:
    return await _respond(request, run_id=str(run_id))


async def _respond(
    request: HttpRequest, *, run_id: str | None
) -> HttpResponse | StreamingHttpResponse:
    refusal = await sync_to_async(_check)(request, run_id)
    if refusal is not None:
        return refusal
    after = request.headers.get("Last-Event-ID") or request.GET.get("after", "")
    response = StreamingHttpResponse(
        stream.events(run=run_id, after=after), content_type="text/event-stream"
    )
    response["Cache-Control"] = "no-store"
    response["X-Accel-Buffering"] = "no"  # nginx passes events on as they come
    return response


def _check(request: HttpRequest, run_id: str | None) -> HttpResponse | None:
    try:
        if not request.user.is_authenticated:
            return HttpResponse("sign in first", status=401, content_type="text/plain")
        if not selectors.may_look(request.user):
            return HttpResponse("no role yet", status=403, content_type="text/plain")
        visible = selectors.runs_for(request.user)
        if run_id is not None and not visible.filter(pk=run_id).exists():
            return HttpResponse("no such run", status=404, content_type="text/plain")
        return None
    finally:
        connections.close_all()
