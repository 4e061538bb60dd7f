"""Static files to serve: all of ``static/`` but the modules that ``static/dist`` is built from.

With ``ARCHIPELAGO_DEBUG`` Django's own finder serves the modules too, and pages load them directly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from typing import Any

from django.conf import settings
from django.contrib.staticfiles.finders import FileSystemFinder

SOURCES = "js"
"""Folder of the modules in ``static/``."""


class ShippedFinder(FileSystemFinder):
    """List the files to serve. WhiteNoise calls this once when the server starts.

    https://docs.djangoproject.com/en/5.2/ref/contrib/staticfiles/#finders-module
    """

    def list(self, ignore_patterns: Iterable[str] | None) -> Iterable[Any]:
        return super().list([*(ignore_patterns or ()), SOURCES])


def scripts_of(page: str) -> list[str]:
    """Paths in ``static/`` of a page's script and of the chunks that it loads at once.

    Raises:
        KeyError: no page of this name has a script.
    """
    if settings.DEBUG:
        return [f"{SOURCES}/{page}.js"]
    return [f"dist/{name}" for name in _manifest()[page]]


@cache
def _manifest() -> dict[str, list[str]]:
    path = settings.BASE_DIR / "static" / "dist" / "manifest.json"
    loaded: dict[str, list[str]] = json.loads(path.read_text())["pages"]
    return loaded
