"""Views of the live streams: one for all pages of a browser, one for a single run.

They authenticate, close the database connection, then stream: an idle viewer holds no connection
and no thread (:mod:`dashboard.live.handler`). Authorization is repeated periodically: the stream of
a user who has signed out, was deactivated or lost a role ends.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.contrib.auth import get_user
from django.contrib.auth.decorators import login_not_required
from django.db import DatabaseError, connections
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.views.decorators.http import require_GET

from dashboard.live import feed
from runs import permissions
from runs.queries import selectors

logger = logging.getLogger(__name__)


# 401 instead of a redirect: an EventSource would follow it to the sign-in page.
@login_not_required
@require_GET
async def runs_stream(request: HttpRequest) -> HttpResponse | StreamingHttpResponse:
    """The stream of a browser: ``?topic=<run id>:<position>`` or ``?topic=list:<position>``, which
    can be repeated. The default is the list, with its position in ``after``."""
    texts = request.GET.getlist("topic") or [f"{feed.LIST}:{request.GET.get('after', '')}"]
    try:
        topics = parse_topics(texts)
    except ValueError as error:
        return HttpResponse(str(error), status=400, content_type="text/plain")
    return await _respond(request, topics)


@login_not_required
@require_GET
async def run_stream(request: HttpRequest, run_id: Any) -> HttpResponse | StreamingHttpResponse:
    return await _respond(request, {str(run_id): request.GET.get("after", "")})


def parse_topics(texts: list[str]) -> dict[str, str]:
    """Map each topic to the position of the page in it. Raises ``ValueError``."""
    if len(texts) > feed.MAX_TOPICS:
        raise ValueError(f"expected at most {feed.MAX_TOPICS} topics, found {len(texts)}")
    topics: dict[str, str] = {}
    for text in texts:
        name, _, after = text.partition(":")
        try:
            topics[name if name in feed.SHARED else str(uuid.UUID(name))] = after
        except ValueError:
            raise ValueError(
                f"topic: expected a run's id, {' or '.join(sorted(feed.SHARED))}, "
                f"found {name[:80]!r}"
            ) from None
    return topics


async def _respond(
    request: HttpRequest, topics: dict[str, str]
) -> HttpResponse | StreamingHttpResponse:
    # A separate context: its thread ends with the query. The semaphore limits how many run at once
    # when a thousand browsers reconnect.
    async with feed.feed().checks, ThreadSensitiveContext():
        visible = await sync_to_async(_check)(request, topics)
    if isinstance(visible, HttpResponse):
        return visible

    holders = feed.holders(request.user.pk, request.session.session_key)
    if feed.feed().is_full(holders):
        refusal = HttpResponse(
            "expected fewer live streams of this user or session: close some, or poll",
            status=429,
            content_type="text/plain",
        )
        refusal["Retry-After"] = "60"
        return refusal

    async def is_authorized() -> bool:
        async with feed.feed().checks, ThreadSensitiveContext():
            return await sync_to_async(_check_again)(request, visible)

    last = request.headers.get("Last-Event-ID", "")
    response = StreamingHttpResponse(
        feed.bounded_events(
            holders, topics=visible, last_event_id=last, is_authorized=is_authorized
        ),
        content_type="text/event-stream",
    )
    response["Cache-Control"] = "no-store"
    response["X-Accel-Buffering"] = "no"  # disables buffering in nginx
    return response


def _check_again(request: HttpRequest, topics: dict[str, str]) -> bool:
    """Whether the session is still valid and its user can still see all topics."""
    store = type(request.session)
    request.session = store(request.session.session_key)
    try:
        request.user = get_user(request)
        return _check(request, topics) == topics
    except DatabaseError as error:
        logger.warning("could not check authorization of a viewer; the stream continues: %s", error)
        return True
    finally:
        connections.close_all()


def _check(request: HttpRequest, topics: dict[str, str]) -> HttpResponse | dict[str, str]:
    """The topics that the user can see, or an error response if there are none."""
    try:
        if not request.user.is_authenticated:
            return HttpResponse("sign in first", status=401, content_type="text/plain")
        if not permissions.can_view(request.user):
            return HttpResponse("no role yet", status=403, content_type="text/plain")
        runs = set(topics) - feed.SHARED
        if runs:
            visible = selectors.visible_runs(request.user).filter(pk__in=runs)
            runs -= {str(pk) for pk in visible.values_list("pk", flat=True)}
        allowed = {name: after for name, after in topics.items() if name not in runs}
        if not allowed:
            return HttpResponse("no such run", status=404, content_type="text/plain")
        return allowed
    finally:
        connections.close_all()
