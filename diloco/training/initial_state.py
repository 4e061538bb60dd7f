"""Load the state of a group: its document, checkpoint 0, the newest checkpoint."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable

from diloco.clock import Clock, SystemClock
from diloco.errors import DamagedObject, ReplicaError, StopReason, StopTraining
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.protocol import keys
from diloco.protocol.group_document import GROUP_LIMIT, GroupDocument
from diloco.protocol.reading import Damaged, ReadAttempts
from diloco.protocol.records import Identity
from diloco.protocol.round_view import Totals
from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.store.base import MissingKey, ObjectTooLarge, Store
from diloco.training.checkpoint import (
    Restored,
    VectorStorage,
    WholeVectors,
    manifest_rounds,
    read_manifest,
    save_checkpoint,
)
from diloco.training.final_result import read_final
from diloco.training.global_state import GlobalState

log = logging.getLogger(__name__)

TURN_S = 1.0
"""Seconds between the attempts of two replicas to write checkpoint 0."""
POLL_S = 0.2
ASK_EVERY_S = 1.0
"""Interval at which a replica that waits for a checkpoint checks leases and the end of the run."""
TRY_AGAIN_S = 20.0
"""Interval between reads of a damaged checkpoint, which other replicas can repair."""
SHORTEST_WAIT_S = 900.0
"""For how long, at least, a replica waits for a checkpoint that another one writes."""
DOCUMENT_WAIT_S = 120.0
"""For how long ``group.json`` is read again if its damaged reads differ."""
DOCUMENT_PAUSE_S, LONGEST_DOCUMENT_PAUSE_S = 0.1, 5.0


def checkpoint_wait_s(settings: GroupSettings) -> float:
    """Return for how long a replica that cannot replay the log waits for a checkpoint: its upload
    is about as large as an exchange, for which the group allows its round timeout."""
    return max(SHORTEST_WAIT_S, settings.round_timeout_s)


def first_checkpoint_wait_s(settings: GroupSettings) -> float:
    """Return for how long a replica waits for the coordinator to write checkpoint 0: for ever in a
    group that waits for its replicas however long that takes."""
    if settings.start_replicas:
        return math.inf
    return max(checkpoint_wait_s(settings), settings.start_wait_s)


def read_document(store: Store, *, clock: Clock | None = None) -> GroupDocument:
    """Read ``group.json``.

    If it is invalid, it is read again: a few times if the reads are equal, and for
    :data:`DOCUMENT_WAIT_S` if they differ, because then they were damaged in transit.

    Raises :class:`ReplicaError` if there is none, and the exceptions of
    :meth:`~diloco.protocol.group_document.GroupDocument.from_bytes`.
    """
    clock = clock or SystemClock()
    give_up_s = clock.monotonic() + DOCUMENT_WAIT_S
    doubt, pause_s = ReadAttempts(), DOCUMENT_PAUSE_S
    while True:
        data: bytes | None = None
        try:
            data = store.get(keys.GROUP, limit=GROUP_LIMIT)
            return GroupDocument.from_bytes(data)
        except MissingKey:
            raise ReplicaError(
                f"expected {keys.GROUP} under {store.uri}, found none. Check the URI, create the "
                "group with python -m diloco.init, or pass settings to diloco.join"
            ) from None
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
        log.warning("%s: %s; reading it again", keys.GROUP, wrong)
        clock.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_DOCUMENT_PAUSE_S)


def first_state(
    store: Store,
    identity: Identity,
    state: GlobalState,
    clock: Clock,
    check: Callable[[], None],
    *,
    committer: Callable[[], int | None] = lambda: None,
    wait_s: float = SHORTEST_WAIT_S,
    on_missing: Callable[[str], None] = lambda message: None,
    storage: VectorStorage | None = None,
) -> bool:
    """Ensure that checkpoint 0 exists; all replicas start from the weights of its creator.

    Replicas try in order of their numbers, so that usually only one uploads its weights. Returns
    whether this replica created it. If ``committer`` returns another replica, only that one can
    create it: ``on_missing`` is called with what this replica waits for, and :class:`ReplicaError`
    is raised after ``wait_s``.
    """
    began_s = clock.monotonic()
    turn_s = began_s + TURN_S * min(identity.replica, 10)
    while True:
        try:
            store.get_range(keys.checkpoint_manifest(0), 0, 1)
            return False
        except MissingKey:
            pass
        creator = committer()
        if creator in (None, identity.replica):
            if clock.monotonic() >= turn_s:
                break
        elif clock.monotonic() < began_s + wait_s:
            on_missing(f"waiting for checkpoint 0 of replica {creator}, the coordinator")
        else:
            raise ReplicaError(
                f"expected checkpoint 0 of replica {creator}, the coordinator, within "
                f"{wait_s:g} s, found none. Start replica {creator}, or name a replica that runs "
                "by the command committer"
            )
        check()
        clock.sleep(POLL_S)
    won = write_first(store, identity, state, clock, storage=storage)
    if won:
        log.info("this replica has written checkpoint 0")
    return won


def write_first(
    store: Store,
    identity: Identity,
    state: GlobalState,
    clock: Clock,
    *,
    replace: bool = False,
    storage: VectorStorage | None = None,
) -> bool:
    """Write the model's weights as checkpoint 0. Returns False if another replica's manifest
    exists. ``replace`` overwrites a damaged checkpoint 0 that this process wrote."""
    weights, outer = state.first_snapshot()
    manifest = save_checkpoint(
        store,
        identity,
        state.layout,
        round=0,
        weights=weights,
        base_rounds=(0,) * state.fragments,
        outer=outer,
        totals=Totals(),
        wall_s=clock.wall(),
        replace=replace,
        storage=storage,
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
    wait_s: float = SHORTEST_WAIT_S,
    on_missing: Callable[[str], None] = lambda message: None,
    storage: VectorStorage | None = None,
) -> Restored:
    """Load the newest readable checkpoint of round ``at_least`` or later; wait until there is one.

    ``on_missing`` is called repeatedly while there is none, with what is waited for. Raises
    :class:`~diloco.errors.StopTraining` if the run ends meanwhile,
    :class:`~diloco.errors.ModelMismatch` for another model, and :class:`ReplicaError` after
    ``wait_s``; its message contains ``why`` the checkpoint is needed.
    """
    needed = f"checkpoint of round {at_least} or later"
    why = why and f", because {why}"
    storage = storage or WholeVectors(store, layout)
    give_up_s = clock.monotonic() + wait_s
    ask_s = clock.monotonic()
    tried_s: dict[int, float] = {}
    damage = ""
    while clock.monotonic() < give_up_s:
        for round in reversed(manifest_rounds(store)):  # an older one replaces a damaged one
            if round < at_least:
                break
            if clock.monotonic() < tried_s.get(round, -math.inf) + TRY_AGAIN_S:
                continue
            try:
                return storage.load(read_manifest(store, round), outer)
            except MissingKey as error:
                log.info("checkpoint %d was deleted while it was read: %s", round, error)
            except (Damaged, DamagedObject) as error:
                damage = f"; {error}"
                log.error("checkpoint %d cannot be read: %s", round, error)
                tried_s[round] = clock.monotonic()
        if clock.monotonic() >= ask_s:
            ask_s = clock.monotonic() + ASK_EVERY_S
            on_missing(f"waiting for a {needed}{why}")
            _stop_if_ended(store)
        check()
        clock.sleep(POLL_S)
    raise ReplicaError(
        f"expected a readable {needed} within {wait_s:g} s{why}, found none{damage}. Restore the "
        "damaged object from a backup, or fork the run from an older checkpoint"
    )


def _stop_if_ended(store: Store) -> None:
    """Raise :class:`StopTraining` if the run has a result, after which no checkpoint is written."""
    with contextlib.suppress(Damaged):
        final = read_final(store)
        if final is not None:
            raise StopTraining(StopReason.of(final.reason))
