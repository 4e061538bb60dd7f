"""Taking from the store what the group has: its document, checkpoint 0, the newest checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable

from diloco.checkpoint import Restored, load_checkpoint, newest_manifest, save_checkpoint
from diloco.errors import ReplicaError
from diloco.layout import Layout
from diloco.outer import OuterOptimizer
from diloco.rendezvous import keys
from diloco.rendezvous.clock import Clock
from diloco.rendezvous.document import GroupDocument
from diloco.rendezvous.records import Identity
from diloco.rendezvous.store import MissingKey, Store
from diloco.rendezvous.view import Totals

log = logging.getLogger(__name__)

TURN_S = 1.0
"""Pause between the turns of two replicas to write checkpoint 0."""
POLL_S = 0.2
WAIT_S = 900.0
"""How long a replica that cannot replay the log waits for somebody's next checkpoint."""


def read_document(store: Store) -> GroupDocument:
    """``group.json`` of a rendezvous. Raises :class:`ReplicaError` where there is none."""
    try:
        return GroupDocument.read(store)
    except MissingKey:
        raise ReplicaError(f"expected {keys.GROUP} under {store.uri}, found none") from None


def first_state(
    store: Store,
    identity: Identity,
    layout: Layout,
    outer: OuterOptimizer,
    clock: Clock,
    check: Callable[[], None],
    *,
    may_create: Callable[[], bool] = lambda: True,
) -> None:
    """See that checkpoint 0 exists: the first replica to create it decides where all start.

    Replicas take turns by number, so that usually one of them uploads its initial weights.
    """
    turn_s = clock.monotonic() + TURN_S * min(identity.replica, 10)
    while True:
        try:
            store.get_range(keys.checkpoint_manifest(0), 0, 1)
            return
        except MissingKey:
            pass
        if clock.monotonic() >= turn_s and may_create():
            break
        check()
        clock.sleep(POLL_S)
    if save_checkpoint(
        store,
        identity,
        layout,
        round=0,
        weights=layout.read(),
        base_rounds=(0,) * layout.table.fragments,
        outer=outer,
        totals=Totals(),
        wall_s=clock.wall(),
    ):
        log.info("checkpoint 0 is written by this replica")


def newest_state(
    store: Store,
    layout: Layout,
    outer: OuterOptimizer,
    at_least: int,
    clock: Clock,
    check: Callable[[], None],
) -> Restored:
    """Load the newest checkpoint, of round ``at_least`` or later, waiting for one if need be.

    Raises :class:`~diloco.errors.ModelMismatch` for another model and :class:`ReplicaError` when
    no such checkpoint appears in time.
    """
    give_up_s = clock.monotonic() + WAIT_S
    while clock.monotonic() < give_up_s:
        manifest = newest_manifest(store)
        if manifest is not None and manifest.round >= at_least:
            try:
                return load_checkpoint(store, manifest, layout, outer)
            except MissingKey as error:
                log.info("checkpoint %d was swept while it was read: %s", manifest.round, error)
        check()
        clock.sleep(POLL_S)
    raise ReplicaError(
        f"expected a checkpoint of round {at_least} or later within {WAIT_S:g} s, found none"
    )
