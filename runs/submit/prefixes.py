"""Decides which prefix a run can use: canonical, below an allowed folder, separate from other runs.

Existing objects in the prefix are checked at launch (:mod:`diloco.protocol.ownership`).
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
    """The location that a run requested as ``wanted``; '' means a new prefix under the default.
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
    """Why no run can use this location; '' if one can."""
    if location.scheme != FILE:
        return ""
    roots = allowed_roots()
    if any(root != location and root.contains(location) for root in roots):
        return ""
    folders = " or ".join(str(root.folder) for root in roots) or "none"
    return (  # without the resolved folder, which would reveal where links point
        f"expected a folder below {folders}, found another once links are resolved; an "
        f"administrator can allow others with {ROOTS_VARIABLE}"
    )


def allowed_roots() -> list[Location]:
    """The folders below which runs are allowed: those of the setting, and the default."""
    roots = [canonical(str(root)) for root in settings.RENDEZVOUS_ROOTS]
    default = canonical(settings.DEFAULT_RENDEZVOUS)
    if default.scheme == FILE and default not in roots:
        roots.append(default)
    return roots


def check_free(location: Location, *, viewer: User | None, but: uuid.UUID | None = None) -> None:
    """Raise :class:`InvalidRun` if another run's prefix equals, contains or is inside this one.

    The message names the other run only if ``viewer`` has permission to see it.
    """
    other = overlapping(location, but=but)
    if other is None:
        return
    other_location = stored(other)
    is_visible = viewer is not None and selectors.runs_for(viewer).filter(pk=other.pk).exists()
    owner = f"of {other.name!r}" if is_visible else "of another run"
    if other_location is None or other_location == location:
        description = f"one that is the prefix {owner}"
    elif other_location.contains(location):
        description = f"one inside the prefix {owner}"
    else:
        description = f"one that contains the prefix {owner}"
    raise InvalidRun(
        FIELD, f"expected a prefix no run has used, found {description}: {location.uri}"
    )


def overlapping(location: Location, *, but: uuid.UUID | None = None) -> Run | None:
    """Another run than ``but`` whose prefix overlaps ``location``."""
    candidates = _candidates(location)
    candidates = candidates if but is None else candidates.exclude(pk=but)
    for run in candidates.only("pk", "name", "rendezvous"):
        other_location = stored(run)
        if other_location is None or other_location.overlaps(location):
            return run
    return None


def inside(run: Run) -> Run | None:
    """Another run whose prefix equals this run's prefix or is inside it."""
    own = stored(run)
    if own is None:
        return Run.objects.exclude(pk=run.pk).filter(rendezvous=run.rendezvous).first()
    for other in _candidates(own).exclude(pk=run.pk).only("pk", "name", "rendezvous"):
        other_location = stored(other)
        if other_location is None or own.contains(other_location):
            return other
    return None


def stored(run: Run) -> Location | None:
    """The location of a run without accessing the disk; None for a URI of an earlier version that
    has no canonical form."""
    try:
        return canonical(run.rendezvous, resolve=False)
    except BadLocation:
        return None


def lock() -> None:
    """Serialise the choice of prefixes until the transaction ends. Otherwise two transactions could
    choose overlapping ones. SQLite's write transactions exclude each other anyway."""
    kind = ContentType.objects.get_for_model(Run)
    ContentType.objects.select_for_update(no_key=True).get(pk=kind.pk)


def _candidates(location: Location) -> QuerySet[Run]:
    """Rows whose text suggests an overlap. SQLite compares without case here, as the Hub does."""
    above = [parent.uri for parent in location.parents]
    same = Q(rendezvous__in=[location.uri, *above])
    if location.scheme == "hf":
        return Run.objects.filter(rendezvous__istartswith="hf://")
    return Run.objects.filter(same | Q(rendezvous__startswith=f"{location.uri.rstrip('/')}/"))
