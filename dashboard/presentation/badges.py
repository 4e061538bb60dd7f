"""State badges: an icon, a word and a colour. The colour never carries the meaning alone.

The tables are files that the scripts of the pages read too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

from django.conf import settings
from django.templatetags.static import static
from django.utils.html import format_html
from django.utils.safestring import SafeString


@dataclass(frozen=True, kw_only=True)
class StateLook:
    """``icon`` is a symbol of ``static/icons.svg``, ``tone`` a colour of ``static/css``."""

    icon: str
    word: str
    tone: str


_TABLES = settings.BASE_DIR / "static/js/lib"

LOOKS: dict[str, tuple[str, str]] = {
    state: (icon, tone)
    for state, (icon, tone) in json.loads((_TABLES / "looks.json").read_text()).items()
}
"""State -> (icon, tone). Runs, replicas, rounds and contributions share one table, because a state
name means the same for all of them."""

BREAKERS: dict[str, tuple[str, str, str]] = {
    state: (icon, tone, label)
    for state, (icon, tone, label) in json.loads((_TABLES / "breakers.json").read_text()).items()
}
"""State of a pool's circuit breaker, or why it launches nothing -> (icon, tone, label)."""


def look(state: str) -> StateLook:
    icon, tone = LOOKS.get(state, ("suspect", "queued"))
    return StateLook(icon=icon, word=state.replace("_", " "), tone=tone)


@lru_cache(maxsize=256)
def icon(name: str) -> SafeString:
    return format_html(
        '<svg class="icon" aria-hidden="true"><use href="{}#{}"></use></svg>',
        static("icons.svg"),
        name,
    )


@lru_cache(maxsize=256)
def state(name: str, modifier: str = "") -> SafeString:
    """A badge. ``modifier`` is an extra class, such as ``state-l``."""
    shown = look(name)
    return format_html(
        '<span class="state {}" data-state="{}" data-tone="{}">{}<span>{}</span></span>',
        modifier,
        name,
        shown.tone,
        icon(shown.icon),
        shown.word,
    )
