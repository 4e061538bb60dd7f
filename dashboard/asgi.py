"""ASGI entry point: ``uvicorn dashboard.asgi:application``."""

import os
import warnings

from django.core.asgi import get_asgi_application

# Static files come as small synchronous streams; Django reads them at once and warns of it.
warnings.filterwarnings("ignore", message="StreamingHttpResponse must consume synchronous")

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dashboard.settings")

application = get_asgi_application()
