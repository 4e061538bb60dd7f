"""Taking from the store what the group has: its document, checkpoint 0, the newest checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator

from diloco.clock import Clock, SystemClock
from diloco.errors import DamagedObject, Leaving, ReplicaError
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.protocol import keys
from diloco.protocol.group_document import GROUP_LIMIT, GroupDocument
from diloco.protocol.reading import Damaged, Doubt
from diloco.protocol.records import CheckpointManifest, Identity
from diloco.protocol.round_view import Totals
from diloco.protocol.settings import SettingsError
from diloco.store.base import MissingKey, ObjectTooLarge, Store
from diloco.training.checkpoint import (
    Restored,
    load_checkpoint,
    manifests,
    read_final,
    save_checkpoint,
)

log = logging.getLogger(__name__)

TURN_S = 1.0
"""Pause between the turns of two replicas to write checkpoint 0."""
POLL_S = 0.2
ASK_EVERY_S = 1.0
"""How often a replica that waits for a checkpoint looks at leases and for the run's end."""
TRY_AGAIN_S = 20.0
"""A damaged checkpoint, which others may repair, is read again so often."""
WAIT_S = 900.0
"""How long a replica that cannot replay the log waits for somebody's next checkpoint."""


DOCUMENT_WAIT_S = 120.0
"""How long ``group.json`` is read again while its reads are damaged and differ."""
DOCUMENT_PAUSE_S, LONGEST_DOCUMENT_PAUSE_S = 0.1, 5.0


def read_document(store: Store, *, clock: Clock | None = None) -> GroupDocument:
    """``group.json`` of a rendezvous, read again where it fails its check: a few times if the reads
    are alike, and for :data:`DOCUMENT_WAIT_S` if they differ, because then they were damaged on
    their way.

    Raises :class:`ReplicaError` where there is none, and what
    :meth:`~diloco.protocol.group_document.GroupDocument.from_bytes` raises.
    """
    clock = clock or SystemClock()
    give_up_s = clock.monotonic() + DOCUMENT_WAIT_S
    doubt, pause_s = Doubt(), DOCUMENT_PAUSE_S
    while True:
        data: bytes | None = None
        try:
            data = store.get(keys.GROUP, limit=GROUP_LIMIT)
            return GroupDocument.from_bytes(data)
        except MissingKey:
            raise ReplicaError(f"expected {keys.GROUP} under {store.uri}, found none") from None
        except ObjectTooLarge as error:
            wrong: ValueError = SettingsError("", str(error))
        except ValueError as error:
            wrong = error
        if doubt.is_settled(data):
            raise wrong
        if clock.monotonic() >= give_up_s:
            raise SettingsError(
                "",
                f"{keys.GROUP}: expected to read it undamaged within {DOCUMENT_WAIT_S:g} s, found "
                f"{doubt.reads} damaged reads that differ, last: {wrong}",
            )
        log.warning("%s: %s; it is read again", keys.GROUP, wrong)
        clock.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_DOCUMENT_PAUSE_S)


def first_state(
    store: Store,
    identity: Identity,
    layout: Layout,
    outer: OuterOptimizer,
    clock: Clock,
    check: Callable[[], None],
    *,
    may_create: Callable[[], bool] = lambda: True,
) -> bool:
    """See that checkpoint 0 exists: the first replica to create it decides where all start. Returns
    whether it was this one.

    Replicas take turns by number, so that usually one of them uploads its initial weights.
    """
    turn_s = clock.monotonic() + TURN_S * min(identity.replica, 10)
    while True:
        try:
            store.get_range(keys.checkpoint_manifest(0), 0, 1)
            return False
        except MissingKey:
            pass
        if clock.monotonic() >= turn_s and may_create():
            break
        check()
        clock.sleep(POLL_S)
    won = write_first(store, identity, layout, outer, clock)
    if won:
        log.info("checkpoint 0 is written by this replica")
    return won


def write_first(
    store: Store,
    identity: Identity,
    layout: Layout,
    outer: OuterOptimizer,
    clock: Clock,
    *,
    replace: bool = False,
) -> bool:
    """Write the model's weights as checkpoint 0; False if another replica's manifest is there.
    ``replace``: this process wrote it before, and what is stored is damaged."""
    manifest = save_checkpoint(
        store,
        identity,
        layout,
        round=0,
        weights=layout.read(),
        base_rounds=(0,) * layout.table.fragments,
        outer=outer,
        totals=Totals(),
        wall_s=clock.wall(),
        replace=replace,
    )
    return manifest is not None


def newest_state(
    store: Store,
    layout: Layout,
    outer: OuterOptimizer,
    at_least: int,
    clock: Clock,
    check: Callable[[], None],
    *,
    why: str = "",
    on_missing: Callable[[], None] = lambda: None,
) -> Restored:
    """Load the newest checkpoint that can be read, of round ``at_least`` or later, waiting for one
    if need be; ``on_missing`` is called while there is none.

    Raises :class:`~diloco.errors.Leaving` if the run ends meanwhile,
    :class:`~diloco.errors.ModelMismatch` for another model and :class:`ReplicaError`, with ``why``
    one is needed, when no such checkpoint appears in time.
    """
    give_up_s = clock.monotonic() + WAIT_S
    ask_s = clock.monotonic()
    tried_s: dict[int, float] = {}
    found = ""
    while clock.monotonic() < give_up_s:
        for manifest in _manifests(store, at_least):
            if clock.monotonic() < tried_s.get(manifest.round, 0.0) + TRY_AGAIN_S:
                continue
            try:
                return load_checkpoint(store, manifest, layout, outer)
            except MissingKey as error:
                log.info("checkpoint %d was swept while it was read: %s", manifest.round, error)
            except DamagedObject as error:
                found = f"; {error}"
                log.error("checkpoint %d cannot be read: %s", manifest.round, error)
                tried_s[manifest.round] = clock.monotonic()
        if clock.monotonic() >= ask_s:
            ask_s = clock.monotonic() + ASK_EVERY_S
            on_missing()
            _leave_if_over(store)
        check()
        clock.sleep(POLL_S)
    why = why and f", because {why}"
    raise ReplicaError(
        f"expected a readable checkpoint of round {at_least} or later within {WAIT_S:g} s{why}, "
        f"found none{found}. Restore the damaged object from a backup, or fork the run from an "
        "older checkpoint"
    )


def _manifests(store: Store, at_least: int) -> Iterator[CheckpointManifest]:
    """Newest first. Where older ones can stand in for a damaged one, they are tried too."""
    return itertools.takewhile(lambda manifest: manifest.round >= at_least, manifests(store))


def _leave_if_over(store: Store) -> None:
    """Where the run has a result, no further checkpoint will be written."""
    with contextlib.suppress(Damaged):
        final = read_final(store)
        if final is not None:
            raise Leaving(final.reason)
