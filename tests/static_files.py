"""One listing of the static files for all test clients.

WhiteNoise lists and stats every static file when a handler is created. Each :class:`Client` has its
own handler, so that takes a third of the time of a test of one request.
"""

from __future__ import annotations

from whitenoise.middleware import WhiteNoiseMiddleware
from whitenoise.responders import StaticFile


def list_once() -> None:
    """Let every middleware use the list of the first one with the same prefix and age."""
    list_files = WhiteNoiseMiddleware.add_files_from_finders
    lists: dict[tuple[str, int | None], dict[str, StaticFile]] = {}

    def add_files_from_finders(middleware: WhiteNoiseMiddleware) -> None:
        key = (middleware.static_prefix, middleware.max_age)
        if key not in lists:
            list_files(middleware)
            lists[key] = dict(middleware.files)
        middleware.files.update(lists[key])

    WhiteNoiseMiddleware.add_files_from_finders = add_files_from_finders  # type: ignore[method-assign]
