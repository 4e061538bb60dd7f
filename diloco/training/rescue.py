"""Helping replicas that cannot read a round which this one has applied.

A payload that is damaged after its round was committed can be read by no replica any more, and a
replica that needs it cannot go on from the log. It shows the round in its lease (``blocked``). A
replica that stands at that round or later then writes a checkpoint, at once and also below quorum;
the blocked one starts from it, and nothing is counted twice, because its contributions up to there
are in the checkpoint's weights already.

Where there is such a checkpoint and the replica is still blocked, that checkpoint is damaged: a
replica that stands at a later round writes another, and one that stands at its round writes it
again, manifest included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from diloco.clock import Clock
from diloco.errors import DamagedObject
from diloco.membership.lease import Observer
from diloco.protocol import keys
from diloco.protocol.reading import Damaged, read_record
from diloco.protocol.records import Commit
from diloco.store.base import MissingKey, Store
from diloco.training.checkpoint import get_object, manifest_rounds, manifests
from diloco.training.global_state import GlobalState
from diloco.training.post_round import Chores

log = logging.getLogger(__name__)

TURN_S = 3.0
"""Pause between the turns of two replicas that could help."""
REPAIR_AFTER_S = 30.0
"""A replica that is blocked for so long beside a checkpoint that it could use cannot read it."""


class Rescue:
    """``place`` is this replica's among those live, for turns."""

    def __init__(
        self,
        store: Store,
        state: GlobalState,
        observer: Observer,
        chores: Chores,
        clock: Clock,
        *,
        replica: int,
        may_create: Callable[[], bool],
    ) -> None:
        self._store = store
        self._state = state
        self._observer = observer
        self._chores = chores
        self._clock = clock
        self._replica = replica
        self._may_create = may_create
        self._blocked: dict[int, int] = {}
        self._since_s = 0.0
        self._repaired_s = 0.0

    def look(self) -> None:
        """Write a checkpoint if a replica needs one and it is this replica's turn. Uses the leases
        that the observer read last."""
        commit = self._state.last_commit
        if commit is None or self._state.weights is None:
            return
        reached = self._state.round - 1
        blocked = {
            replica: round
            for replica, round in self._observer.blocked().items()
            if round <= reached and replica != self._replica
        }
        now_s = self._clock.monotonic()
        if blocked != self._blocked:
            self._blocked, self._since_s = blocked, now_s
        if not blocked or now_s < self._since_s + TURN_S * self._place() or not self._may_create():
            return
        wanted = max(blocked.values())
        newest = max(manifest_rounds(self._store), default=0)
        if newest < wanted:
            log.warning(
                "replicas %s cannot read round %d; a checkpoint is written for them",
                sorted(blocked), wanted,
            )  # fmt: skip
            self._mend_commit(commit)
            self._chores.checkpoint(commit)
        elif now_s > max(self._since_s, self._repaired_s) + REPAIR_AFTER_S:
            self._repaired_s = now_s
            self._repair(commit, newest)

    def mend_commits(self, known: Iterable[Commit]) -> None:
        """Before this process leaves: write the commits of its last round and later again if they
        are damaged, as it may be the only process that has read them."""
        for commit in known:
            if commit.round >= self._state.round - 1:
                self._mend_commit(commit)

    def _place(self) -> int:
        others = self._observer.live() - set(self._blocked)
        return sorted(others | {self._replica}).index(self._replica)

    def _mend_commit(self, commit: Commit) -> None:
        """If the stored commit of this replica's round is what the others cannot read, write the
        same record again."""
        key = keys.commit(commit.round)
        try:
            read_record(self._store, key, Commit, is_right=lambda c: c.round == commit.round)
        except Damaged as error:
            log.error("%s; it is written again", error)
            self._store.put(key, commit.to_bytes())
        except MissingKey:
            pass

    def _repair(self, commit: Commit, newest: int) -> None:
        self._mend_commit(commit)
        if newest < self._state.round - 1:
            self._chores.checkpoint(commit)
            return
        manifest = next(manifests(self._store), None)
        if manifest is None or manifest.round != newest or newest != self._state.round - 1:
            self._chores.rewrite_checkpoint(commit)
            return
        for described in (manifest.weights, manifest.outer):
            if described is None:
                continue
            try:
                get_object(self._store, described)
            except (DamagedObject, MissingKey) as error:
                log.error("checkpoint %d: %s; it is written again", newest, error)
                self._chores.rewrite_checkpoint(commit)
                return
