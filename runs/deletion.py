"""Carrying out a deletion that somebody asked for (:func:`runs.life.delete`).

First the objects, if they are to go, then the rows: whoever dies in between is repeated. Objects
are deleted only under the names that the protocol knows, below the run's own prefix and only where
``group.json`` is this run's; it goes last, so that a deletion that was broken off can be told from
somebody else's rendezvous. Anything else that lies there stays.
"""

from __future__ import annotations

import logging

from diloco.rendezvous import keys
from diloco.rendezvous.document import GroupDocument, ProtocolMismatch
from diloco.rendezvous.settings import SettingsError
from diloco.rendezvous.store import MissingKey, Store, StoreDenied, StoreUnavailable
from runs.bucket.stores import store_for
from runs.exceptions import LaunchLater
from runs.life import sharing
from runs.models import Event, Run
from runs.states import RUN_ENDED
from runs.transitions import record_event

logger = logging.getLogger(__name__)

FOLDERS = (
    keys.MEMBERS, keys.ROUNDS, keys.CHECKPOINTS, keys.CONTROL, "code/", "final/", "heal/",
    "state/", "telemetry/",
)  # fmt: skip
AT_ONCE = 500


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
    try:
        found = GroupDocument.read(store).run_id
    except MissingKey:
        return ""  # nothing was ever launched, or an earlier try came this far
    except (SettingsError, ProtocolMismatch) as error:
        return f"{store.uri}: {error}"
    if found != str(run.pk):
        return f"{store.uri}: expected {keys.GROUP} of run {run.pk}, found that of {found}"
    for folder in FOLDERS:
        listed = [info.key for info in store.list(folder)]
        for start in range(0, len(listed), AT_ONCE):
            store.delete(listed[start : start + AT_ONCE])
    store.delete([keys.GROUP])
    return ""
