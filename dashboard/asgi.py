"""ASGI entry point: ``uvicorn dashboard.asgi:application``."""

import os
import warnings
from typing import Any

from django.core.asgi import get_asgi_application

# Static files come as small synchronous streams; Django reads them at once and warns of it.
warnings.filterwarnings("ignore", message="StreamingHttpResponse must consume synchronous")

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dashboard.settings")

_pages = get_asgi_application()

from dashboard.live_handler import LiveHandler, is_live  # noqa: E402 -- needs Django set up

_live = LiveHandler()


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Live streams have a handler of their own, everything else is Django's."""
    await (_live if is_live(scope) else _pages)(scope, receive, send)
