"""ASGI entry point: ``uvicorn dashboard.asgi:application``."""

import gc
import logging
import os
import warnings
from typing import Any

from django.core.asgi import get_asgi_application

# Django warns about static files, which are small synchronous streams that it reads at once.
warnings.filterwarnings("ignore", message="StreamingHttpResponse must consume synchronous")

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dashboard.settings")

from dashboard.security.private_files import set_umask  # noqa: E402 -- before anything is created

set_umask()
_pages = get_asgi_application()

from django.conf import settings  # noqa: E402 -- Django is set up now
from django.urls import get_resolver  # noqa: E402

from dashboard.checks import at_start  # noqa: E402
from dashboard.live.handler import LiveHandler, is_live  # noqa: E402
from dashboard.logging import configure_handlers  # noqa: E402
from dashboard.security.proxies import TrustedProxies, parse_networks  # noqa: E402
from dashboard.security.request_bodies import BoundedBodies  # noqa: E402
from executors.loading import warm_up  # noqa: E402

for _name in ("uvicorn", "uvicorn.access"):
    configure_handlers(logging.getLogger(_name), settings.LOG_FORMAT)

at_start()
_live = LiveHandler()

# Exclude everything loaded so far from garbage collection. Otherwise the collector scans it now and
# then during a request, which delays that request by 100 ms.
_ = get_resolver().url_patterns
gc.collect()
gc.freeze()
# A page makes some ten thousand objects: the collector looks at them once, not every 700.
gc.set_threshold(10_000, 10, 10)
warm_up()  # import the client libraries of the backends in the background: it takes seconds


async def _route(scope: Any, receive: Any, send: Any) -> None:
    """Send live streams to their own handler, everything else to Django."""
    await (_live if is_live(scope) else _pages)(scope, receive, send)


application = TrustedProxies(BoundedBodies(_route), parse_networks(settings.TRUSTED_PROXIES))
