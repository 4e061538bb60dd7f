"""State badges: an icon, a word and a colour. The colour never carries the meaning alone.

The tables are files that the scripts of the pages read too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from django.conf import settings


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
