"""Carries out a requested deletion (:func:`runs.actions.lifecycle.delete`).

Objects are deleted first, if requested, then the rows, so that an interrupted deletion is repeated.
Objects are deleted only below a prefix with this run's marker, and only if the protocol creates
keys of that form (:func:`diloco.protocol.keys.kind_of`). All other objects and their folders stay.
``group.json`` and then the marker are deleted last: an interrupted deletion can still identify the
owner of the prefix. What the run has spent is kept (:mod:`runs.actions.retained_spend`).

:func:`plan_deletion` lists what would be deleted and kept, without deleting anything.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

from django.db import transaction
from django.utils import timezone

from diloco.protocol import keys, ownership
from diloco.protocol.group_document import GroupDocument, ProtocolMismatch
from diloco.protocol.keys import Kind, kind_of
from diloco.protocol.settings import SettingsError
from diloco.store.base import (
    LocalStore,
    MissingKey,
    ObjectInfo,
    Store,
    StoreDenied,
    StoreUnavailable,
)
from runs.actions import evaluations
from runs.actions.retained_spend import retain
from runs.backends.parallel_calls import call_all
from runs.exceptions import LaunchLater
from runs.ingest.stores import folder_store, store_for
from runs.models import Event, Run
from runs.redaction import clean_text
from runs.states import RUN_ENDED
from runs.submit.prefixes import inside
from runs.times import has_passed
from runs.transitions import record_event

logger = logging.getLogger(__name__)

AT_ONCE = 500
LISTED = 100_000
"""Objects that a plan counts. For a larger prefix it shows that there are more."""
PLAN_S = 5.0
"""Seconds after which a plan stops counting pages."""
SLICE_S = 30.0
"""Seconds after which a deletion stops and is continued by the next task."""
WAIT_FOR_EVALUATIONS = timedelta(minutes=10)
"""How long jobs of evaluations, which write into the bucket, are waited for. After that the reaper
ends them."""
NAMED = 20
"""Kept objects that a plan lists by name."""
NAME_LENGTH = 300
GROUP_BYTES = 10_000_000
_LAST = (Kind.GROUP, Kind.OWNER)
"""Deleted last, in this order."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Number and bytes of the objects of one kind."""

    kind: str
    objects: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class DeletionPlan:
    """The objects that a deletion would delete, by kind, and those it would keep.

    ``kept_names`` are the first of the ``kept`` objects. ``whole`` False: there are more objects
    than were listed. ``refusal`` is why nothing would be deleted, otherwise ''.
    """

    deleted: tuple[Part, ...] = ()
    kept: int = 0
    kept_bytes: int = 0
    kept_names: tuple[str, ...] = ()
    whole: bool = True
    refusal: str = ""

    @property
    def objects(self) -> int:
        return sum(part.objects for part in self.deleted)

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.deleted)


def plan_deletion(run: Run) -> DeletionPlan:
    """Plan the deletion of a run's objects, as far as the store answers in time."""
    other = inside(run)
    if other is not None:
        return DeletionPlan(refusal=f"the rendezvous of {other.name!r} is inside this one")
    _ = run.store_credential  # loaded here, because the thread must not use the database
    answer = call_all({"objects": lambda: _plan(store_for(run), str(run.pk))})["objects"]
    if isinstance(answer, DeletionPlan):
        return answer
    return DeletionPlan(refusal=clean_text(str(answer)) or type(answer).__name__)


def _plan(store: Store, run_id: str) -> DeletionPlan:
    if refusal := foreign_reason(store, run_id):
        return DeletionPlan(refusal=refusal)
    listed, is_complete = _first_pages(store)
    launched = _has_evidence(store)
    parts: dict[str, list[int]] = {}
    kept: list[ObjectInfo] = []
    for info in listed:
        kind = kind_of(info.key) if launched else None
        if kind is None:
            kept.append(info)
        else:
            part = parts.setdefault(kind, [0, 0])
            part[0] += 1
            part[1] += info.size_bytes
    return DeletionPlan(
        deleted=tuple(
            Part(kind=kind, objects=count, size_bytes=size)
            for kind, (count, size) in sorted(parts.items())
        ),
        kept=len(kept),
        kept_bytes=sum(info.size_bytes for info in kept),
        kept_names=tuple(_shown(info.key) for info in kept[:NAMED]),
        whole=is_complete,
    )


def _first_pages(
    store: Store, *, clock: Callable[[], float] = time.monotonic
) -> tuple[list[ObjectInfo], bool]:
    """The first objects sorted by key, and whether they are all: an endless listing must not
    prevent a deletion."""
    until_s = clock() + PLAN_S
    objects: list[ObjectInfo] = []
    is_complete = True
    with contextlib.closing(store.list_pages("")) as pages:
        for page in pages:
            objects += page
            if len(objects) > LISTED or clock() > until_s:
                is_complete = len(objects) <= LISTED and next(pages, None) is None
                break
    return sorted(objects[:LISTED], key=lambda info: info.key), is_complete


def _shown(key: str) -> str:
    """A foreign key, made safe to print and store."""
    return clean_text(key.encode("utf-8", "replace").decode(), NAME_LENGTH)


def foreign_reason(store: Store, run_id: str) -> str:
    """Why the prefix does not belong to this run; '' if its marker, or the ``group.json`` of a run
    from before markers, names the run."""
    try:
        owner = ownership.owner_of(store)
    except ownership.PrefixTaken as error:
        return str(error)
    if owner is not None:
        if owner == run_id:
            return ""
        return f"{store.uri}: expected {keys.OWNER} of run {run_id}, found that of {owner}"
    try:
        group_run_id = GroupDocument.from_bytes(store.get_range(keys.GROUP, 0, GROUP_BYTES)).run_id
    except MissingKey:
        return ""  # never launched, or already deleted
    except (SettingsError, ProtocolMismatch, ValueError) as error:
        return f"{store.uri}: {error}"
    if group_run_id == run_id:
        return ""
    return f"{store.uri}: expected {keys.GROUP} of run {run_id}, found that of {group_run_id}"


def delete_run(run_id: str) -> None:
    """Delete a run. Idempotent. Raises :class:`LaunchLater` while the bucket is unavailable."""
    run = Run.objects.filter(pk=run_id, delete_requested_at__isnull=False).first()
    if run is None or run.state not in RUN_ENDED:
        return
    assert run.delete_requested_at is not None
    waited = has_passed(run.delete_requested_at, WAIT_FOR_EVALUATIONS, timezone.now())
    if evaluations.cancel_all(run) and not waited:
        raise LaunchLater("the evaluations of the run are being cancelled")
    if run.delete_objects:
        try:
            refusal = _delete_objects(run, store_for(run))
        except StoreUnavailable as error:
            raise LaunchLater(str(error)) from error
        except StoreDenied as error:
            refusal = str(error)
        if refusal:
            Run.objects.filter(pk=run.pk).update(delete_requested_at=None)
            record_event(run, "deleted", f"was not deleted: {refusal}", level=Event.Level.ERROR)
            return
    with transaction.atomic():
        locked = Run.objects.select_for_update().get(pk=run.pk)
        retain(locked, now=timezone.now())
        locked.delete()
    logger.warning("run %s (%s) is deleted", run_id, run.name)


def _delete_objects(run: Run, store: Store) -> str:
    """Delete the run's objects; return why none was deleted, otherwise ''."""
    other = inside(run)
    if other is not None:
        return f"the rendezvous of {other.name!r} is inside this one"
    if refusal := foreign_reason(store, str(run.pk)):
        return refusal
    if not _has_evidence(store):
        return ""
    kept, kept_names = _delete_pages(store)
    store.delete([keys.GROUP])  # in the order of _LAST
    store.delete([keys.OWNER])
    if (folder := folder_store(store)) is not None:
        _remove_folders(folder)
    if kept_names:
        names = ownership.shown(kept_names, kept)
        logger.warning("run %s: kept foreign objects in %s: %s", run.pk, store.uri, names)
    return ""


def _delete_pages(
    store: Store, *, clock: Callable[[], float] = time.monotonic
) -> tuple[int, list[str]]:
    """Delete the run's objects page by page, except the last ones.

    Returns the number of foreign objects and some of their names. Raises :class:`LaunchLater` if
    objects are left after :data:`SLICE_S`; the next attempt lists only what is left.
    """
    until_s = clock() + SLICE_S
    kept, deleted, kept_names = 0, 0, list[str]()
    with contextlib.closing(store.list_pages("")) as pages:
        for page in pages:
            known = {info.key: kind for info in page if (kind := kind_of(info.key)) is not None}
            run_keys = [key for key, kind in known.items() if kind not in _LAST]
            _delete(store, run_keys)
            others = [info.key for info in page if info.key not in known]
            kept_names += [_shown(key) for key in others[: NAMED - len(kept_names)]]
            kept, deleted = kept + len(others), deleted + len(run_keys)
            if deleted and clock() > until_s:
                raise LaunchLater(f"{deleted} objects are deleted, and more are left")
    return kept, kept_names


def _has_evidence(store: Store) -> bool:
    """Whether any object names an owner. Otherwise all objects can belong to others."""
    for key in (keys.OWNER, keys.GROUP):
        with contextlib.suppress(MissingKey):
            store.get_range(key, 0, 1)
            return True
    return False


def _delete(store: Store, run_keys: Iterable[str]) -> None:
    names = sorted(run_keys)
    for start in range(0, len(names), AT_ONCE):
        store.delete(names[start : start + AT_ONCE])


def _remove_folders(store: LocalStore) -> None:
    """Remove the protocol's empty folders, temporary files of killed writers, and the run's own
    folder if it is empty."""
    store.remove_leftovers(keys.kind_of, keys.is_folder)
