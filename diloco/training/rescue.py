"""Checkpoints for replicas that cannot read a committed round.

If a payload is damaged after its round was committed, a replica that has not applied the round
cannot continue from the log. It shows the round in its lease (``blocked``). A replica that has
applied the round then writes a checkpoint, at once and also below quorum, and the blocked replica
loads it. No step counts twice, because the checkpoint contains all contributions up to its round.

If the replica is still blocked beside such a checkpoint, the checkpoint is damaged. A replica at a
later round writes another one; a replica at the same round rewrites it, including its manifest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from diloco.errors import DamagedObject
from diloco.membership.observer import Observer
from diloco.protocol import keys
from diloco.protocol.reading import Damaged, read_record
from diloco.protocol.records import Commit
from diloco.store.base import MissingKey
from diloco.training.checkpoint import manifest_rounds, manifests
from diloco.training.context import ReplicaContext
from diloco.training.global_state import GlobalState
from diloco.training.post_round import PostRoundTasks
from diloco.training.stored_objects import verify_object

log = logging.getLogger(__name__)

TURN_S = 3.0
"""Seconds between the attempts of two replicas to help."""
REPAIR_AFTER_S = 30.0
"""Seconds after which a replica that is blocked beside a usable checkpoint cannot read it."""


class Rescue:
    """Watches the leases for blocked replicas. Live replicas help in order of their numbers."""

    def __init__(
        self,
        context: ReplicaContext,
        state: GlobalState,
        observer: Observer,
        tasks: PostRoundTasks,
    ) -> None:
        self._context = context
        self._store = context.store
        self._replica = context.identity.replica
        self._clock = context.clock
        self._state = state
        self._observer = observer
        self._tasks = tasks
        self._blocked: dict[int, int] = {}
        self._since_s = 0.0
        self._repaired_s = 0.0

    def look(self) -> None:
        """Write a checkpoint if a replica is blocked and this replica is scheduled to help. Uses
        the leases that the observer has read last."""
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
        due_s = self._since_s + TURN_S * self._stagger_index()
        if not blocked or now_s < due_s or not self._context.can_create():
            return
        required = max(blocked.values())
        newest = max(manifest_rounds(self._store), default=0)
        if newest < required:
            log.warning(
                "replicas %s cannot read round %d; writing a checkpoint for them",
                sorted(blocked),
                required,
            )
            self._repair_commit(commit)
            self._tasks.checkpoint(commit)
        elif now_s > max(self._since_s, self._repaired_s) + REPAIR_AFTER_S:
            self._repaired_s = now_s
            self._repair(commit, newest)

    def repair_commits(self, known: Iterable[Commit]) -> None:
        """Before this process leaves, rewrite damaged commits of its last round and later; it can
        be the only process that has read them."""
        for commit in known:
            if commit.round >= self._state.round - 1:
                self._repair_commit(commit)

    def _stagger_index(self) -> int:
        others = self._observer.live() - set(self._blocked)
        return sorted(others | {self._replica}).index(self._replica)

    def _repair_commit(self, commit: Commit) -> None:
        """Rewrite the record of a commit if the stored one is damaged."""
        key = keys.commit(commit.round)
        try:
            read_record(self._store, key, Commit, is_right=lambda c: c.round == commit.round)
        except Damaged as error:
            log.error("%s; rewriting it", error)
            self._store.put(key, commit.to_bytes())
        except MissingKey:
            pass

    def _repair(self, commit: Commit, newest: int) -> None:
        self._repair_commit(commit)
        if newest < self._state.round - 1:
            self._tasks.checkpoint(commit)
            return
        manifest = next(manifests(self._store), None)
        if manifest is None or manifest.round != newest or newest != self._state.round - 1:
            self._tasks.rewrite_checkpoint(commit)
            return
        for described in (manifest.weights, manifest.outer):
            if described is None:
                continue
            try:
                verify_object(self._store, described)
            except (DamagedObject, MissingKey) as error:
                log.error("checkpoint %d: %s; rewriting it", newest, error)
                self._tasks.rewrite_checkpoint(commit)
                return
