"""The position in the live stream at which a page continues after it has loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.http import HttpRequest, HttpResponse

from runs import live_stream


def follows_stream(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Let the page of a view follow the live stream from the position before its first query, so
    that no change is lost between the query and the connection of the page. `base.html` holds the
    position; a part of the page (``?part=1``) needs none."""

    @wraps(view)
    def with_cursor(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if not request.GET.get("part"):
            request.live_cursor = live_stream.latest_id()  # type: ignore[attr-defined]
        return view(request, *args, **kwargs)

    return with_cursor
