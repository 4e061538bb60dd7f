"""The theme of the pages: that of the system, light, or dark; remembered per browser in a cookie.

The server writes the choice into the page (``data-theme``), so that a page never appears in the
other theme first, and no inline script is needed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from django.http import HttpRequest

COOKIE = "theme"
YEAR_S = 365 * 24 * 3600


class Theme(StrEnum):
    SYSTEM = "system"
    LIGHT = "light"
    DARK = "dark"


def chosen(request: HttpRequest | None) -> Theme:
    """The theme of the browser's cookie; any other value counts as none."""
    value = request.COOKIES.get(COOKIE) if request else None
    return Theme(value) if value in list(Theme) else Theme.SYSTEM


def context(request: HttpRequest) -> dict[str, Any]:
    """For the templates: the current theme and the choices."""
    return {"theme": chosen(request), "themes": [(one.value, one.value.title()) for one in Theme]}
