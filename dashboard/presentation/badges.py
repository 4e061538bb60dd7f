"""How a state looks: an icon, a word and a tone. Colour never stands alone.

``static/js/lib/states.js`` is the browser's copy of these tables; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StateLook:
    """``icon`` is a symbol in ``static/icons.svg``, ``tone`` a colour in ``static/css``."""

    icon: str
    word: str
    tone: str


# state -> (icon, tone). Runs, replicas, rounds and contributions share one table, as a word means
# the same thing wherever it stands.
LOOKS: dict[str, tuple[str, str]] = {
    "draft": ("draft", "queued"),
    "queued": ("queued", "queued"),
    "provisioning": ("provisioning", "provisioning"),
    "running": ("running", "running"),
    "degraded": ("degraded", "warning"),
    "stalled": ("stalled", "warning"),
    "pausing": ("paused", "queued"),
    "paused": ("paused", "queued"),
    "stopping": ("stopping", "warning"),
    "succeeded": ("succeeded", "succeeded"),
    "failed": ("failed", "failed"),
    "cancelled": ("cancelled", "queued"),
    "pending": ("queued", "queued"),
    "syncing": ("syncing", "provisioning"),
    "computing": ("computing", "running"),
    "uploading": ("uploading", "running"),
    "waiting": ("stalled", "queued"),
    "applying": ("applying", "running"),
    "suspect": ("suspect", "warning"),
    "lost": ("lost", "failed"),
    "restarting": ("restarting", "provisioning"),
    "draining": ("draining", "warning"),
    "evicted": ("evicted", "failed"),
    "done": ("succeeded", "succeeded"),
    "collecting": ("collecting", "running"),
    "planned": ("planned", "running"),
    "committed": ("succeeded", "succeeded"),
    "void": ("void", "warning"),
    "timed_out": ("queued", "warning"),
    "uploaded": ("uploading", "running"),
    "included": ("included", "succeeded"),
    "late": ("late", "warning"),
    "refused": ("refused", "failed"),
    "missing": ("missing", "queued"),
    "healing": ("syncing", "provisioning"),
}


def look(state: str) -> StateLook:
    icon, tone = LOOKS.get(state, ("suspect", "queued"))
    return StateLook(icon=icon, word=state.replace("_", " "), tone=tone)
