"""Context of ``runs/_without_script.html``: the lists of the selected tab of a run page as the
server renders them, for browsers without JavaScript.

Every page load pays for them, so only the selected tab has them, with at most one query.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django.http import HttpRequest

from dashboard.parameters import text_of
from runs.ingest.limits import INT_LIMIT
from runs.models import ReplicaPool, Run
from runs.queries import plain_lists, selectors

LOG_LINES = 200
LOG_CHARS = 2000
"""Characters of a log line; the file has all."""


def plain_context(
    request: HttpRequest,
    run: Run,
    tab: str,
    *,
    pools: Iterable[ReplicaPool],
    replicas: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The lists of a tab, and the number at which its next page begins.

    ``?below=`` is the round, ``?above=`` the replica before the first one of the page.
    """
    if tab in ("rounds", "timeline"):
        rounds = plain_lists.newest_rounds(run, below=_number(request, "below"))
        last = rounds[-1].round.number if len(rounds) == plain_lists.MOST else None
        return {"plain_rounds": rounds, "plain_below": last}
    if tab in ("replicas", "system"):
        above = _number(request, "above")
        shown = plain_lists.replicas_from(run, above=-1 if above is None else above)
        more = len(shown) == plain_lists.MOST and shown[-1].number != replicas[-1]["number"]
        return {
            "plain_replicas": shown,
            "plain_above": shown[-1].number if more else None,
            "plain_pools": plain_lists.pool_lines(pools, replicas) if tab == "replicas" else [],
        }
    if tab == "logs":
        lines = selectors.log_rows(
            run,
            replica=_number(request, "replica"),
            limit=LOG_LINES,
            search=text_of(request.GET, "q")[:200],
            level=request.GET.get("level", ""),
            around=_number(request, "line"),
        )
        for line in lines:
            line["message"] = line["message"][:LOG_CHARS]
        return {"plain_lines": lines}
    return {}


def _number(request: HttpRequest, name: str) -> int | None:
    """A parameter that is a number of the database, None for any other text."""
    text = request.GET.get(name, "")
    fits = text.isascii() and text.isdecimal() and len(text) < 20
    return int(text) if fits and int(text) <= INT_LIMIT else None
