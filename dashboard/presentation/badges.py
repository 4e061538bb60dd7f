"""State badges: an icon, a word and a colour. The colour never carries the meaning alone.

The table is a file that ``static/js/lib/states.js`` reads too.
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


LOOKS: dict[str, tuple[str, str]] = {
    state: (icon, tone)
    for state, (icon, tone) in json.loads(
        (settings.BASE_DIR / "static/js/lib/looks.json").read_text()
    ).items()
}
"""State -> (icon, tone). Runs, replicas, rounds and contributions share one table, because a state
name means the same for all of them."""


def look(state: str) -> StateLook:
    icon, tone = LOOKS.get(state, ("suspect", "queued"))
    return StateLook(icon=icon, word=state.replace("_", " "), tone=tone)
