"""Requests for a live stream, without a thread for as long as it lasts.

Django gives each request that meets anything synchronous (its own middleware, its own signals) a
thread, and keeps that until the response has ended: for a stream, minutes. A thousand viewers would
be a thousand threads. This handler has its own, fully asynchronous middleware and no such thread:
what it must ask the database runs in one that ends with the answer (``dashboard/live/views.py``).

Left out, because streams need none of it: messages, CSRF (they change nothing), the redirect to the
sign-in page (an EventSource is told 401). Sessions are read and never written.
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
    """Django's ``middleware`` with its hooks called in the event loop: for those without I/O."""

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


def people(get_response: GetResponse) -> GetResponse:
    """Session and user; neither is looked up before somebody asks."""
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
    people,
    inline(XFrameOptionsMiddleware),
)


class LiveHandler(ASGIHandler):
    """Django's handler with :data:`MIDDLEWARE` and no thread of its own."""

    def load_middleware(self, is_async: bool = False) -> None:
        """In place of Django's, which reads the setting ``MIDDLEWARE``."""
        this: Any = self  # these attributes are not in the stubs
        this._view_middleware = []
        this._template_response_middleware = []
        this._exception_middleware = []
        handler: Any = convert_exception_to_response(this._get_response_async)
        for middleware in reversed(MIDDLEWARE):
            handler = convert_exception_to_response(middleware(handler))
        this._middleware_chain = handler

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # Django's enters a ThreadSensitiveContext here, whose thread would last as long as we do.
        await self.handle(scope, receive, send)


def is_live(scope: Mapping[str, Any]) -> bool:
    """Whether an ASGI scope asks for one of :data:`VIEWS`."""
    if scope["type"] != "http" or not scope["path"].endswith("/stream"):
        return False
    path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
    try:
        return resolve(path).func in VIEWS
    except Resolver404:
        return False
