"""The streams of a browser's pages, and of one run.

Authenticate, close the database connection, then stream: an idle viewer holds none, and no thread
(:mod:`dashboard.live.handler`). Who is watching is looked up again now and then, in the same way:
somebody who was signed out, deactivated or lost a role is not told anything more.
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


# A browser's EventSource would follow a redirect to the sign-in page; 401 says it plainly.
@login_not_required
@require_GET
async def runs_stream(request: HttpRequest) -> HttpResponse | StreamingHttpResponse:
    """``?topic=`` as often as needed: a run's id or ``list``, then ``:`` and where the page is.
    Without any it is the list's own, which says where it is by ``after``."""
    words = request.GET.getlist("topic") or [f"{feed.LIST}:{request.GET.get('after', '')}"]
    try:
        topics = parse_topics(words)
    except ValueError as error:
        return HttpResponse(str(error), status=400, content_type="text/plain")
    return await _respond(request, topics)


@login_not_required
@require_GET
async def run_stream(request: HttpRequest, run_id: Any) -> HttpResponse | StreamingHttpResponse:
    return await _respond(request, {str(run_id): request.GET.get("after", "")})


def parse_topics(words: list[str]) -> dict[str, str]:
    """Topic -> where the page is with it. Raises ``ValueError`` saying expected and found."""
    if len(words) > feed.MAX_TOPICS:
        raise ValueError(f"expected at most {feed.MAX_TOPICS} topics, found {len(words)}")
    topics: dict[str, str] = {}
    for word in words:
        name, _, after = word.partition(":")
        try:
            topics[name if name == feed.LIST else str(uuid.UUID(name))] = after
        except ValueError:
            raise ValueError(
                f"topic: expected a run's id or {feed.LIST!r}, found {name[:80]!r}"
            ) from None
    return topics


async def _respond(
    request: HttpRequest, topics: dict[str, str]
) -> HttpResponse | StreamingHttpResponse:
    # A context of its own: the thread that looks the session up goes when that is done. As many at
    # once as the feed allows, so that a thousand browsers that come back take turns.
    async with feed.feed().checks, ThreadSensitiveContext():
        visible = await sync_to_async(_check)(request, topics)
    if isinstance(visible, HttpResponse):
        return visible

    holders = feed.holders(request.user.pk, request.session.session_key)
    if feed.feed().is_full(holders):
        answer = HttpResponse(
            "expected fewer live streams of this user or session: close some, or poll",
            status=429, content_type="text/plain",
        )  # fmt: skip
        answer["Retry-After"] = "60"
        return answer

    async def still() -> bool:
        async with feed.feed().checks, ThreadSensitiveContext():
            return await sync_to_async(_check_again)(request, visible)

    last = request.headers.get("Last-Event-ID", "")
    response = StreamingHttpResponse(
        feed.bounded_events(holders, topics=visible, last_event_id=last, still=still),
        content_type="text/event-stream",
    )
    response["Cache-Control"] = "no-store"
    response["X-Accel-Buffering"] = "no"  # nginx passes events on as they come
    return response


def _check_again(request: HttpRequest, topics: dict[str, str]) -> bool:
    """Whether the session is still somebody's who may see all of them."""
    store = type(request.session)
    request.session = store(request.session.session_key)
    try:
        request.user = get_user(request)
        return _check(request, topics) == topics
    except DatabaseError as error:
        logger.warning("who watches could not be looked up again, so they go on: %s", error)
        return True
    finally:
        connections.close_all()


def _check(request: HttpRequest, topics: dict[str, str]) -> HttpResponse | dict[str, str]:
    """Those topics that this user may see; or why not any."""
    try:
        if not request.user.is_authenticated:
            return HttpResponse("sign in first", status=401, content_type="text/plain")
        if not permissions.may_look(request.user):
            return HttpResponse("no role yet", status=403, content_type="text/plain")
        runs = set(topics) - {feed.LIST}
        if runs:
            visible = selectors.runs_for(request.user).filter(pk__in=runs)
            runs -= {str(pk) for pk in visible.values_list("pk", flat=True)}
        allowed = {name: after for name, after in topics.items() if name not in runs}
        if not allowed:
            return HttpResponse("no such run", status=404, content_type="text/plain")
        return allowed
    finally:
        connections.close_all()
