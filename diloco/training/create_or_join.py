"""Create the group of a rendezvous, or check that the group there is the expected one.

Several replicas can do this at once: ``group.json`` is created only if it is absent, so one of them
creates the group and the others find it. Nothing is ever replaced or deleted.
"""

from __future__ import annotations

import contextlib
import logging
import random

from diloco.clock import Clock
from diloco.errors import GroupExists, ReplicaError, SettingsMismatch
from diloco.protocol import keys
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.reading import Damaged
from diloco.protocol.settings import GroupSettings
from diloco.store.base import Store
from diloco.store.retry import RetryingStore
from diloco.training.final_result import read_final
from diloco.training.initial_state import read_document

log = logging.getLogger(__name__)

NAMED = 3
"""Number of differing settings that an error names."""
DEADLINE_S = 60.0
"""For how long a failed request is retried."""


def create_or_check(
    store: Store, settings: GroupSettings, *, fresh: bool | str = False, clock: Clock
) -> GroupDocument:
    """Create the group with ``settings`` if there is none; return the document of the group.

    With ``fresh`` the group must be new: True requires that this call creates it, a name requires
    a group that was created with this name, by this call or by another replica of the same run.

    Raises:
        SettingsMismatch: the group has other settings.
        GroupExists: the group is not the one that ``fresh`` requires.
        ReplicaError: there is no group, and the store has no atomic create, so that two replicas
            could create two.
        ProtocolMismatch, SettingsError, StoreError: as for :func:`diloco.join`.
    """
    store = RetryingStore(store, clock=clock, rng=random.Random(), deadline_s=DEADLINE_S)
    own = GroupDocument.new(settings, name=fresh if isinstance(fresh, str) else "")
    if store.atomic_create and store.create(keys.GROUP, own.to_bytes()):
        log.info("created the group of run %s at %s", own.run_id, store.uri)
        return own
    try:
        found = read_document(store, clock=clock)
    except ReplicaError:
        if store.atomic_create:
            raise
        raise ReplicaError(
            f"expected {keys.GROUP} under {store.uri}, found none, and this store has no "
            "conditional writes, so that replicas can't create the group. Create it once with "
            "python -m diloco.init, then join it"
        ) from None
    if fresh is True or (fresh and found.name != fresh):
        expected = "no group" if fresh is True else f"the run {fresh!r}"
        raise GroupExists(
            f"fresh: expected {expected} under {store.uri}, found run {found.run_id} "
            f"{found.name!r}{_progress(store)}. It is not changed. Enter another URI for the new "
            f"run, e.g. {store.uri.rstrip('/')}-2, or join this one without fresh"
        )
    if differences := settings.differences(found.settings):
        more = f", and {len(differences) - NAMED} more" if len(differences) > NAMED else ""
        raise SettingsMismatch(
            f"expected the settings of this call in the group under {store.uri}, found others: "
            f"{'; '.join(differences[:NAMED])}{more}. A group's settings can't change: enter its "
            "settings, join without settings to accept them, or enter another URI for a new group"
        )
    return found


def _progress(store: Store) -> str:
    """Describe how far the run at a store is, if its result can be read."""
    with contextlib.suppress(Damaged):
        final = read_final(store)
        return f", {final.reason} after round {final.round}" if final else ", which has no result"
    return ""
