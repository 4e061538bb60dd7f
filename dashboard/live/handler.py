"""Handler of live streams that needs no thread while a stream is open.

If a request meets anything synchronous (middleware, signals), Django gives it a thread until the
response ends, which takes minutes for a stream: a thousand viewers would need a thousand threads.
This handler has its own asynchronous middleware and no such thread. Database queries run in a
thread that is released after each query (``dashboard/live/views.py``).

It leaves out messages, CSRF (streams change nothing) and the redirect to the sign-in page (an
EventSource gets 401). Sessions are read-only.
https://docs.djangoproject.com/en/5.2/topics/async/ describes the threads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from typing import Any

from csp.middleware import CSPMiddleware
from django.conf import settings
from django.contrib.auth import get_user
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.exception import convert_exception_to_response
from django.http import HttpRequest, HttpResponseBase
from django.middleware.clickjacking import XFrameOptionsMiddleware
from django.middleware.common import CommonMiddleware
from django.middleware.security import SecurityMiddleware
from django.urls import Resolver404, resolve
from django.utils.functional import SimpleLazyObject

from dashboard.live import views

GetResponse = Callable[[HttpRequest], Awaitable[HttpResponseBase]]
Middleware = Callable[[GetResponse], GetResponse]

VIEWS = frozenset({views.runs_stream, views.run_stream})


def inline(middleware: type[Any]) -> Middleware:
    """Django's ``middleware``, with its hooks called in the event loop. It must do no I/O."""

    def make(get_response: GetResponse) -> GetResponse:
        hooks = middleware(get_response)

        async def handle(request: HttpRequest) -> HttpResponseBase:
            response = None
            if hasattr(hooks, "process_request"):
                response = hooks.process_request(request)
            if response is None:
                response = await get_response(request)
            if hasattr(hooks, "process_response"):
                response = hooks.process_response(request, response)
            return response

        return handle

    return make


def authentication(get_response: GetResponse) -> GetResponse:
    """Set session and user. Both are loaded lazily."""
    store = import_module(settings.SESSION_ENGINE).SessionStore

    async def handle(request: HttpRequest) -> HttpResponseBase:
        request.session = store(request.COOKIES.get(settings.SESSION_COOKIE_NAME))
        request.user = SimpleLazyObject(lambda: get_user(request))  # type: ignore[assignment]
        return await get_response(request)

    return handle


MIDDLEWARE: tuple[Middleware, ...] = (
    inline(SecurityMiddleware),
    inline(CSPMiddleware),
    inline(CommonMiddleware),
    authentication,
    inline(XFrameOptionsMiddleware),
)


class LiveHandler(ASGIHandler):
    """Django's handler with :data:`MIDDLEWARE` and without a thread per request."""

    def load_middleware(self, is_async: bool = False) -> None:
        """Replaces Django's method, which loads the setting ``MIDDLEWARE``."""
        handler: Any = self  # these attributes are not in the stubs
        handler._view_middleware = []
        handler._template_response_middleware = []
        handler._exception_middleware = []
        chain: Any = convert_exception_to_response(handler._get_response_async)
        for middleware in reversed(MIDDLEWARE):
            chain = convert_exception_to_response(middleware(chain))
        handler._middleware_chain = chain

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # Django enters a ThreadSensitiveContext here, whose thread lasts as long as the response.
        await self.handle(scope, receive, send)


def is_live(scope: Mapping[str, Any]) -> bool:
    """Whether an ASGI scope is a request to one of :data:`VIEWS`."""
    if scope["type"] != "http" or not scope["path"].endswith("/stream"):
        return False
    path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
    try:
        return resolve(path).func in VIEWS
    except Resolver404:
        return False
