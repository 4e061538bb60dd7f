"""Carrying out a deletion that was requested (:func:`runs.actions.lifecycle.delete`).

First the objects, if they are to go, then the rows: a deletion that is interrupted is done again.
Objects are deleted only below a prefix that carries this run's marker, and only those whose keys
the protocol makes (:func:`diloco.protocol.keys.kind_of`); every other object stays, and with it
the folders it lies in. ``group.json`` and then the marker go last, so that a deletion that was
interrupted still finds whose the prefix is.

:func:`plan_deletion` lists what would go and what would stay, and deletes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

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
from runs.actions.lifecycle import sharing
from runs.backends.parallel_calls import ask_all
from runs.exceptions import LaunchLater
from runs.ingest.stores import folder_store, store_for
from runs.models import Event, Run
from runs.states import RUN_ENDED
from runs.transitions import clean_text, record_event

logger = logging.getLogger(__name__)

AT_ONCE = 500
LISTED = 100_000
"""Objects that a plan counts; of a larger prefix it shows that there are more."""
PLAN_S = 5.0
"""Seconds after which a plan counts no more pages."""
SLICE_S = 30.0
"""Seconds after which a deletion is interrupted, to be taken up again."""
NAMED = 20
"""Objects that stay, by name in a plan."""
NAME_LENGTH = 300
GROUP_BYTES = 10_000_000
_LAST = (Kind.GROUP, Kind.OWNER)
"""Deleted after everything else, in this order."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """So many objects of one kind, and their bytes."""

    kind: str
    objects: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class DeletionPlan:
    """What deleting a run with its objects would delete, by kind, and what it would keep.

    ``kept_names`` are the first of the ``kept`` objects. ``whole`` False: there are more objects
    than were listed. ``refusal`` says why nothing would be deleted, '' otherwise.
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
    """What would go and what would stay, as far as the store answers in time."""
    other = sharing(run)
    if other is not None:
        return DeletionPlan(refusal=f"the rendezvous of {other.name!r} lies inside this one's")
    _ = run.store_credential  # read here: the thread that asks has no business in the database
    answer = ask_all({"objects": lambda: _plan(store_for(run), str(run.pk))})["objects"]
    if isinstance(answer, DeletionPlan):
        return answer
    return DeletionPlan(refusal=clean_text(str(answer)) or type(answer).__name__)


def _plan(store: Store, run_id: str) -> DeletionPlan:
    if refusal := why_not_ours(store, run_id):
        return DeletionPlan(refusal=refusal)
    listed, whole = _first_pages(store)
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
        whole=whole,
    )


def _first_pages(
    store: Store, *, clock: Callable[[], float] = time.monotonic
) -> tuple[list[ObjectInfo], bool]:
    """Sorted by key, and whether these are all: a listing without an end is no reason that a run
    cannot be deleted."""
    until_s = clock() + PLAN_S
    found: list[ObjectInfo] = []
    whole = True
    with contextlib.closing(store.list_pages("")) as pages:
        for page in pages:
            found += page
            if len(found) > LISTED or clock() > until_s:
                whole = len(found) <= LISTED and next(pages, None) is None
                break
    return sorted(found[:LISTED], key=lambda info: info.key), whole


def _shown(key: str) -> str:
    """A name that others chose, fit to be printed and stored."""
    return clean_text(key.encode("utf-8", "replace").decode(), NAME_LENGTH)


def why_not_ours(store: Store, run_id: str) -> str:
    """Why nothing in the prefix may be deleted for that run; '' where its marker, or a
    ``group.json`` of a run from before there were markers, says that it is the run's."""
    try:
        owner = ownership.owner_of(store)
    except ownership.PrefixTaken as error:
        return str(error)
    if owner is not None:
        if owner == run_id:
            return ""
        return f"{store.uri}: expected {keys.OWNER} of run {run_id}, found that of {owner}"
    try:
        found = GroupDocument.from_bytes(store.get_range(keys.GROUP, 0, GROUP_BYTES)).run_id
    except MissingKey:
        return ""  # never launched, or everything of the run is gone
    except (SettingsError, ProtocolMismatch, ValueError) as error:
        return f"{store.uri}: {error}"
    if found == run_id:
        return ""
    return f"{store.uri}: expected {keys.GROUP} of run {run_id}, found that of {found}"


def delete_run(run_id: str) -> None:
    """Done twice it does nothing. Raises :class:`LaunchLater` while the bucket is away."""
    run = Run.objects.filter(pk=run_id, delete_requested_at__isnull=False).first()
    if run is None or run.state not in RUN_ENDED:
        return
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
    run.delete()
    logger.warning("run %s (%s) is deleted", run_id, run.name)


def _delete_objects(run: Run, store: Store) -> str:
    """'' when they are gone, else why not one of them is."""
    other = sharing(run)
    if other is not None:
        return f"the rendezvous of {other.name!r} lies inside this one's"
    if refusal := why_not_ours(store, str(run.pk)):
        return refusal
    if not _has_evidence(store):
        return ""
    kept, stays = _delete_pages(store)
    store.delete([keys.GROUP])  # in the order of _LAST
    store.delete([keys.OWNER])
    if (folder := folder_store(store)) is not None:
        _remove_folders(folder)
    if stays:
        names = ownership.shown(stays, kept)
        logger.warning("run %s: not of the run, so kept in %s: %s", run.pk, store.uri, names)
    return ""


def _delete_pages(
    store: Store, *, clock: Callable[[], float] = time.monotonic
) -> tuple[int, list[str]]:
    """Delete the run's objects page by page, but for those that go last; how many others there
    are, and the names of some. Raises :class:`LaunchLater` where objects are left after
    :data:`SLICE_S`: what is deleted need not be listed again, so the next try goes on."""
    until_s = clock() + SLICE_S
    kept, deleted, stays = 0, 0, list[str]()
    with contextlib.closing(store.list_pages("")) as pages:
        for page in pages:
            known = {info.key: kind for info in page if (kind := kind_of(info.key)) is not None}
            doomed = [key for key, kind in known.items() if kind not in _LAST]
            _delete(store, doomed)
            others = [info.key for info in page if info.key not in known]
            stays += [_shown(key) for key in others[: NAMED - len(stays)]]
            kept, deleted = kept + len(others), deleted + len(doomed)
            if deleted and clock() > until_s:
                raise LaunchLater(f"{deleted} objects are deleted, and more are left")
    return kept, stays


def _has_evidence(store: Store) -> bool:
    """Whether anything names an owner. Without, the prefix may hold objects of others only."""
    for key in (keys.OWNER, keys.GROUP):
        with contextlib.suppress(MissingKey):
            store.get_range(key, 0, 1)
            return True
    return False


def _delete(store: Store, doomed: Iterable[str]) -> None:
    names = sorted(doomed)
    for start in range(0, len(names), AT_ONCE):
        store.delete(names[start : start + AT_ONCE])


def _remove_folders(store: LocalStore) -> None:
    """Of a folder: the folders of the protocol that are empty, what writers that were killed left
    in them, and the run's own folder, if nothing else lies there."""
    store.remove_leftovers(keys.kind_of, keys.is_folder)
