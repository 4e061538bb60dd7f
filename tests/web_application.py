"""The application of a web server that imports the client libraries of backends at their first use.

The server imports them at its start, because they take seconds. Few tests need one.
"""

from __future__ import annotations

from executors import loading

_wait_loaded = loading.wait_loaded
loading.warm_up = lambda *backends: None
loading.wait_loaded = lambda backends, **patience: _wait_loaded(backends, patience_s=600)

from dashboard.asgi import application  # noqa: E402 -- it starts the imports

__all__ = ["application"]
