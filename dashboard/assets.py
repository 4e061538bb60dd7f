"""Static files to serve: all of ``static/`` but the modules that ``static/dist/app.js`` combines.

With ``ARCHIPELAGO_DEBUG`` Django's own finder serves the modules too, and pages load them directly.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.contrib.staticfiles.finders import FileSystemFinder

SOURCES = "js"
"""Folder of the modules in ``static/``."""


class ShippedFinder(FileSystemFinder):
    """List the files to serve. WhiteNoise calls this once when the server starts.

    https://docs.djangoproject.com/en/5.2/ref/contrib/staticfiles/#finders-module
    """

    def list(self, ignore_patterns: Iterable[str] | None) -> Iterable[Any]:
        return super().list([*(ignore_patterns or ()), SOURCES])
