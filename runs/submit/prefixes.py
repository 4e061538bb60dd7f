"""Which prefix a run may have: one spelling, below an allowed folder, and apart from every other
run's.

What lies in it is looked at when the run is launched (:mod:`diloco.protocol.ownership`).
"""

from __future__ import annotations

import uuid
from pathlib import Path

from django.conf import settings
from django.contrib.auth.models import User
from django.contrib.contenttypes.models import ContentType
from django.db.models import Q, QuerySet

from diloco.store.location import FILE, BadLocation, Location, canonical
from runs.exceptions import InvalidRun
from runs.models import Run
from runs.queries import selectors

FIELD = "rendezvous"
LENGTH = 500
ROOTS_VARIABLE = "ARCHIPELAGO_RENDEZVOUS_ROOTS"


def location_for(wanted: str, run_id: uuid.UUID) -> Location:
    """Where a run that asks for ``wanted`` lies; '' is a prefix of its own under the default.
    Raises :class:`InvalidRun`."""
    if len(wanted) > LENGTH:
        raise InvalidRun(FIELD, f"expected at most {LENGTH} characters, found {len(wanted)}")
    wanted = wanted.strip() or f"{settings.DEFAULT_RENDEZVOUS.rstrip('/')}/{run_id}"
    if "://" not in wanted and ":" not in wanted and not Path(wanted).is_absolute():
        raise InvalidRun(FIELD, f"expected a URI or an absolute path, found {wanted!r}")
    try:
        location = canonical(wanted)
    except BadLocation as error:
        raise InvalidRun(FIELD, str(error)) from None
    if len(location.uri) > LENGTH:
        raise InvalidRun(FIELD, f"expected at most {LENGTH} characters, found {len(location.uri)}")
    if problem := not_allowed(location):
        raise InvalidRun(FIELD, problem)
    return location


def not_allowed(location: Location) -> str:
    """Why no run may lie there; '' where one may."""
    if location.scheme != FILE:
        return ""
    roots = allowed_roots()
    if any(root != location and root.contains(location) for root in roots):
        return ""
    folders = " or ".join(str(root.folder) for root in roots) or "none"
    return (  # without the resolved folder, which would reveal where links of this machine lead
        f"expected a folder below {folders}, found another once links are resolved; an "
        f"administrator can allow others with {ROOTS_VARIABLE}"
    )


def allowed_roots() -> list[Location]:
    """The folders below which runs may lie: those of the setting, and the default."""
    found = [canonical(str(root)) for root in settings.RENDEZVOUS_ROOTS]
    default = canonical(settings.DEFAULT_RENDEZVOUS)
    if default.scheme == FILE and default not in found:
        found.append(default)
    return found


def check_free(location: Location, *, viewer: User | None, but: uuid.UUID | None = None) -> None:
    """Raises :class:`InvalidRun` where another run's prefix is this one, lies inside it, or
    contains it. ``viewer`` is shown the name of a run that they may see."""
    other = overlapping(location, but=but)
    if other is None:
        return
    theirs = stored(other)
    seen = viewer is not None and selectors.runs_for(viewer).filter(pk=other.pk).exists()
    whose = f"of {other.name!r}" if seen else "of another run"
    if theirs is None or theirs == location:
        found = f"one that is the prefix {whose}"
    elif theirs.contains(location):
        found = f"one inside the prefix {whose}"
    else:
        found = f"one that contains the prefix {whose}"
    raise InvalidRun(FIELD, f"expected a prefix no run has used, found {found}: {location.uri}")


def overlapping(location: Location, *, but: uuid.UUID | None = None) -> Run | None:
    """Another run than ``but`` that an object at ``location`` could belong to."""
    found = _candidates(location)
    found = found if but is None else found.exclude(pk=but)
    for run in found.only("pk", "name", "rendezvous"):
        theirs = stored(run)
        if theirs is None or theirs.overlaps(location):
            return run
    return None


def inside(run: Run) -> Run | None:
    """Another run whose prefix is this one's or lies inside it."""
    mine = stored(run)
    if mine is None:
        return Run.objects.exclude(pk=run.pk).filter(rendezvous=run.rendezvous).first()
    for other in _candidates(mine).exclude(pk=run.pk).only("pk", "name", "rendezvous"):
        theirs = stored(other)
        if theirs is None or mine.contains(theirs):
            return other
    return None


def stored(run: Run) -> Location | None:
    """A run's place, without a look at the disk; None for one of an earlier version that could not
    be brought into canonical form."""
    try:
        return canonical(run.rendezvous, resolve=False)
    except BadLocation:
        return None


def lock() -> None:
    """Let one transaction at a time choose a prefix, until it ends: of two that were each alone
    when they looked, the second looks again. SQLite's write transactions exclude one another."""
    kind = ContentType.objects.get_for_model(Run)
    ContentType.objects.select_for_update(no_key=True).get(pk=kind.pk)


def _candidates(location: Location) -> QuerySet[Run]:
    """Rows whose text says that they may overlap; SQLite compares without regard to case, as the
    Hub does."""
    above = [parent.uri for parent in location.parents]
    same = Q(rendezvous__in=[location.uri, *above])
    if location.scheme == "hf":
        return Run.objects.filter(rendezvous__istartswith="hf://")
    return Run.objects.filter(same | Q(rendezvous__startswith=f"{location.uri.rstrip('/')}/"))
