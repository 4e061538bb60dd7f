"""What Ctrl-K offers: pages, actions, runs and replicas that match a few typed characters.

Built for one user: it offers nothing that the user's role does not allow, and each page and action
checks that again. The current run's actions come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import urlencode

from django.contrib.auth.models import User
from django.urls import NoReverseMatch, reverse

from runs import permissions
from runs.queries import finder
from runs.queries.finder import FoundRun
from runs.queries.fuzzy import score, words_of
from runs.states import RUN_ENDED, RUN_LIVE, RUN_TRANSITIONS, RunState

LIMIT = 12
RUNS = 8
_ANY, _OPERATOR, _ADMIN = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row of the palette (:class:`archipelago.frame_rows.Found`)."""

    kind: str
    label: str
    detail: str = ""
    url: str
    state: str = ""


@dataclass(frozen=True, kw_only=True)
class _Page:
    name: str
    """Of its URL."""
    label: str
    words: str = ""
    """Other words that find it."""
    query: str = ""
    role: int = _ANY
    kind: str = "page"


PAGES = (
    _Page(name="runs", label="Runs", words="list home all"),
    _Page(name="runs", label="Active runs", query="q=is:active", words="running live"),
    _Page(name="runs", label="Failed runs", query="q=state:failed", words="errors"),
    _Page(name="runs", label="My runs", query="q=is:mine", words="mine own"),
    _Page(name="fleet", label="Fleet", words="jobs machines gpus capacity quota orphans"),
    _Page(name="compare", label="Compare", words="comparison"),
    _Page(name="boards", label="Boards", words="comparison saved"),
    _Page(name="sweeps", label="Sweeps", words="search hyperparameters"),
    _Page(name="spend", label="Spend", words="cost money budget"),
    _Page(name="planner", label="Planner", words="estimate traffic"),
    _Page(name="alerts", label="Alerts", words="bell notifications warnings problems"),
    _Page(name="settings-backends", label="Backends", words="settings breaker quota state"),
    _Page(name="settings-budgets", label="Budgets", words="settings limits money"),
    _Page(name="settings-prices", label="Prices", words="settings hardware cost"),
    _Page(name="settings-webhooks", label="Webhooks", words="settings notify", role=_ADMIN),
    _Page(name="settings-credentials", label="Credentials", words="settings keys", role=_ADMIN),
    _Page(name="users", label="People", words="settings users roles", role=_ADMIN),
    _Page(name="tokens", label="API tokens", words="settings keys account"),
    _Page(name="password", label="Password", words="settings account"),
    _Page(name="api-docs", label="API reference", words="docs openapi help"),
    _Page(name="admin:index", label="Administration", words="django admin", role=_ADMIN),
    _Page(name="run-new", label="New run", words="submit launch", role=_OPERATOR, kind="action"),
)

VERBS = {
    "stop": ("Stop", "at the newest round, with final weights"),
    "pause": ("Pause", "save, and release the machines"),
    "resume": ("Resume", "from the newest checkpoint"),
    "save": ("Save now", "a checkpoint of the next round"),
    "clone": ("Clone", "new run with the same settings"),
}
"""Action on a run -> its label and effect."""


def entries(user: User, text: str, *, run_id: str = "", limit: int = LIMIT) -> list[dict[str, Any]]:
    """The entries for a query, the best first. ``run_id`` is the run of the current page."""
    role = _role(user)
    current = finder.run_of(user, run_id) if run_id else None
    words, number = finder.split(text)
    found = list(_of_runs(user, role, words, number, current))
    query = words_of(finder.clean(text))
    found += _ranked(query, _pages(role))
    order = sorted(range(len(found)), key=lambda at: (-found[at][0], at))
    result = [asdict(found[at][1]) for at in order]
    return list({(row["label"], row["url"]): row for row in result}.values())[:limit]


def _role(user: User) -> int:
    if permissions.has_role(user, "admin"):
        return _ADMIN
    return _OPERATOR if permissions.can_submit(user) else _ANY


Scored = tuple[float, Entry]


def _ranked(words: list[str], entries_with_words: Iterable[tuple[Entry, str]]) -> list[Scored]:
    """The entries that match all words by label or other words. Without words pages come last."""
    result = []
    for entry, others in entries_with_words:
        by_label = score(words, entry.label)
        points = score(words, f"{entry.label} {others}") if by_label is None else by_label + 1
        if points is not None:
            result.append((points, entry))
    return result


def _pages(role: int) -> Iterator[tuple[Entry, str]]:
    for page in PAGES:
        if page.role > role:
            continue
        try:
            url = reverse(page.name)
        except NoReverseMatch:
            continue
        query = f"?{page.query}" if page.query else ""
        yield Entry(kind=page.kind, label=page.label, url=f"{url}{query}"), page.words


def _of_runs(
    user: User, role: int, words: list[str], number: int | None, current: FoundRun | None
) -> Iterator[Scored]:
    """Runs, replicas, and actions on runs."""
    verbs = [verb for verb in VERBS if words and len(words[0]) > 1 and verb.startswith(words[0])]
    if verbs and len(words) > 1:
        for run in finder.find_runs(user, words[1:], limit=RUNS):
            yield from ((12.0, entry) for entry in _actions(user, role, run, verbs))
    if current is not None:
        wanted = verbs or ([] if words else list(VERBS))
        yield from ((14.0, entry) for entry in _actions(user, role, current, wanted))
    if number is not None:
        rest = [word for word in words[:-1] if word != "replica"]
        runs = finder.find_runs(user, rest, limit=RUNS) if rest else []
        if current is not None:
            runs = [current, *(run for run in runs if run.id != current.id)]
        for replica in finder.find_replicas(runs, number):
            yield 11.0, _replica(replica)
    for run in finder.find_runs(user, words, limit=RUNS):
        points = score(words, run.name)
        yield (2.0 if points is None else points + 0.5), _run(run)


def _run(run: FoundRun) -> Entry:
    return Entry(
        kind="run",
        label=run.name,
        detail=f"{run.owner} · {str(run.id)[:8]}",
        url=reverse("run", args=[run.id]),
        state=run.state,
    )


def _replica(found: finder.FoundReplica) -> Entry:
    return Entry(
        kind="replica",
        label=f"Replica {found.number}",
        detail=found.run.name,
        url=reverse("replica", args=[found.run.id, found.number]),
        state=found.state,
    )


def _actions(user: User, role: int, run: FoundRun, verbs: Iterable[str]) -> Iterator[Entry]:
    """The actions that the user can take on a run in its state."""
    can_operate = role == _ADMIN or (role == _OPERATOR and run.owner_id == user.pk)
    for verb in verbs:
        label, effect = VERBS[verb]
        entry = Entry(kind="action", label=f"{label} {run.name}", detail=effect, url="")
        if verb == "clone":
            if role >= _OPERATOR:
                query = urlencode({"clone": run.id})
                yield replace(entry, url=f"{reverse('run-new')}?{query}")
        elif can_operate and is_possible(verb, run.state):
            yield replace(entry, url=reverse("run-do", args=[run.id, verb]))


def is_possible(verb: str, state: str) -> bool:
    """Whether a run in that state allows the action, as far as its state decides."""
    to = {"stop": RunState.STOPPING, "pause": RunState.PAUSING}.get(verb)
    if to is not None:
        return to in RUN_TRANSITIONS[RunState(state)]
    if verb == "resume":
        return state == RunState.PAUSED or state in RUN_ENDED - {RunState.SUCCEEDED}
    return verb == "save" and state in RUN_LIVE
