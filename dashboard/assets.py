"""Which files of ``static/`` are served: all but the modules ``static/dist/app.js`` is made of.

With ``ARCHIPELAGO_DEBUG`` Django's own finder is used, and pages load the modules themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.contrib.staticfiles.finders import FileSystemFinder

SOURCES = "js"
"""Folder in ``static/``."""


class ShippedFinder(FileSystemFinder):
    """Lists what is served, as WhiteNoise asks for it once when the server starts.

    https://docs.djangoproject.com/en/5.2/ref/contrib/staticfiles/#finders-module
    """

    def list(self, ignore_patterns: Iterable[str] | None) -> Iterable[Any]:
        return super().list([*(ignore_patterns or ()), SOURCES])
