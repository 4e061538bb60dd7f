"""Settles one round: waits for its commit, and does what the round needs if no other replica does.

A follower polls the one key that it waits for; only the first two replicas in the order of
candidates list contributions, leases and reduced shards (:mod:`diloco.exchange.waiting`).
:func:`diloco.protocol.round_decision.decide` returns the next action.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from diloco.errors import RoundTimeout
from diloco.exchange.exchange_context import ExchangeContext
from diloco.exchange.reduce import CannotReduce, Merged, Own, Reduction
from diloco.exchange.round_observer import Base
from diloco.exchange.timings import Timings
from diloco.exchange.waiting import ExpectedWait, Stage, patience_s
from diloco.protocol import keys
from diloco.protocol.control_pace import READ_AHEAD_PAYLOADS
from diloco.protocol.parallel_reads import run_both
from diloco.protocol.reading import Damaged
from diloco.protocol.records import Commit, ContributionRecord, Identity, Plan, Refusal
from diloco.protocol.round_decision import decide, shards_of, void_unplanned
from diloco.protocol.round_view import (
    FAR,
    GATHER,
    SHARDED,
    SYNCER,
    WHOLE,
    Action,
    DecisionState,
    ListShards,
    MakeCommit,
    MakePlan,
    Merge,
    Reduce,
    Wait,
)
from diloco.store.base import StoreError

log = logging.getLogger(__name__)

SHARD_LOOKS = 2
"""Listings of reduced shards by a process whose turn it is not, to read them before the commit."""
LARGE_SHARD_LOOKS = 16
"""Those of a plan whose owners have several shards, which are large."""
ARRIVAL_S = 1.0
"""Time after which a process looks again that has found hardly any contribution."""
STAGGER_S = 1.0
"""Delay between two candidates for creating a plan or a commit."""
DAMAGE_PATIENCE_S = 10.0
"""Seconds of reading a damaged plan or commit of a decided round before giving up."""


class ContributionLost(Exception):
    """The record of an earlier process's contribution cannot be read, and no plan includes it."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A durable contribution.

    ``own`` has the encoded vector, for this replica's part of the reduction. ``checking`` reads the
    stored payload back.
    """

    record: ContributionRecord
    own: Own
    checking: Future[str]

    def damage(self) -> str:
        """Wait until the payload was read back; return the damage that repeated uploads did not
        fix, '' if there is none. Raises :class:`~diloco.store.base.StoreError`."""
        return self.checking.result()

    def close(self) -> None:
        """End the reads of other payloads."""
        if self.own.ahead is not None:
            self.own.ahead.close()


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """The result of a round.

    ``plan`` is None for a void round whose plan cannot be read. ``merged`` is None for a void
    round, and in a process that contributed nothing. ``refusal`` is the plan's refusal of this
    replica's contribution. ``cosine`` is that of its contribution to the merged mean
    (:mod:`diloco.exchange.cosine`), if the plan includes it.
    """

    commit: Commit
    plan: Plan | None
    merged: Merged | None
    refusal: Refusal | None = None
    cosine: float | None = None


class RoundSettlement:
    """One round from this process's contribution to the round's result.

    ``sent`` is this process's contribution. Without one, ``earlier`` is the process of this replica
    that contributed, if any.
    """

    def __init__(
        self,
        context: ExchangeContext,
        round: int,
        *,
        base: Base,
        sent: Sent | None,
        timings: Timings,
        earlier: Identity | None = None,
    ) -> None:
        self._context = context
        self._round_observer = context.round_observer
        self._settings = context.settings
        self._clock = context.clock
        self._round = round
        self._base = base
        self._sent = sent
        self._timings = timings
        self._earlier = earlier
        self._started_s = context.clock.monotonic()
        self._missed_s = self._started_s
        """When a poll last did not find what it waits for."""
        self._damaged_since_s: float | None = None
        self._memory = DecisionState()
        self._plan: Plan | None = None
        self._reduction: Reduction | None = None
        self._merges: dict[int, Merge] = {}
        self._merged: Merged | None = None
        self._reduced: dict[int, tuple[str, ...]] | None = None
        self._plan_was_missing = self._commit_is_missing = False
        self._is_committing = self._is_checked = self._has_committed = False
        self._shard_looks = SHARD_LOOKS
        self._plan_is_early = sent is not None and context.history.plan.is_longer(1.0)
        """No plan can be expected yet: this process has just contributed, and always waits, or it
        is the first one to plan."""

    def close(self) -> None:
        """End the reads that have begun before the plan or the commit."""
        if self._sent is not None:
            self._sent.close()
        if self._reduction is not None:
            self._reduction.close()

    def run(self) -> RoundResult:
        """Wait for the round's commit and return the result; the errors are those of
        :meth:`diloco.exchange.round_exchange.Exchange.settle`."""
        waiting_since_s = self._started_s
        history = self._context.history
        self._stage: Stage = self._begin_stage(history.candidates, history.plan)
        self._plan_is_early |= self._sent is not None and self._stage.turn.place == 0
        while True:
            self._context.check()
            self._begin_commit_if_reduced()
            commit, damaged = self._read_commit()
            self._begin_commit_if_reduced()
            now_s = self._clock.monotonic()
            if commit is not None and (self._plan is not None or commit.void):
                self._remember(now_s)
                return self._result(commit)
            is_overdue = now_s > waiting_since_s + self._settings.round_timeout_s
            lists = self._round_observer.is_coordinator or self._stage.lists(now_s)
            action: Action | None = None
            try:
                if damaged is not None:
                    action = self._await_readable(damaged, commit, now_s)
                elif self._must_reduce or lists or is_overdue:
                    action = self._decide(now_s)
                elif self._stage.turn.check():
                    self._require_own_record()
            except Damaged as error:  # the previous round's exchange handles its commit
                action = Wait(FAR, str(error))
            if action is None:
                missing = "plan" if self._plan is None else "commit"
                action = Wait(FAR, f"waiting for another replica to {missing}")
            if not isinstance(action, Wait):
                self._act(action)
                continue
            # No process waits for the lease of one that has contributed and lists nothing.
            is_calm = self._sent is not None and self._plan is None and not lists
            is_calm = is_calm and not self._settings.overlap_steps
            self._context.lease.update(message=action.why, calm=is_calm)
            if action.patient:
                waiting_since_s = now_s
            elif is_overdue:
                raise RoundTimeout(
                    f"round {self._round}: expected a commit within "
                    f"{self._settings.round_timeout_s:g} s, found none ({action.why})"
                )
            self._reduced = None
            if lists:
                self._stage.act_at(action.until_s)
            self._missed_s = now_s
            with self._timings.measure("wait"):
                pause_s = self._stage.pause_s(now_s, until_s=action.until_s, lists=lists)
                self._clock.sleep(pause_s)

    def _found(self, plan: Plan | None) -> None:
        """Note a plan. If it was missing a moment ago, its commit is not there yet."""
        self._plan = plan
        if plan is None:
            self._plan_was_missing = True
            return
        if len(set(plan.owners)) < len(plan.owners) and self._sent is not None:
            self._shard_looks = LARGE_SHARD_LOOKS
        self._context.history.plan.add(self._came_s() - self._started_s)
        self._commit_is_missing = self._plan_was_missing

    def _came_s(self) -> float:
        """Estimate when the plan or commit that was just found was created. A poll finds it later,
        and if waits were remembered as that long, the next poll would be later still."""
        return (self._missed_s + self._clock.monotonic()) / 2

    @property
    def _must_reduce(self) -> bool:
        """Whether a plan waits for this process's own reduction."""
        plan, own = self._plan, self._round_observer.identity.replica
        if plan is None:
            return False
        if plan.mode == GATHER:
            return WHOLE not in self._merges
        return any(shard not in self._merges for shard in shards_of(plan, own))

    def _begin_stage(self, candidates: Sequence[Identity], expected: ExpectedWait) -> Stage:
        """Begin to wait for the plan or the commit."""
        observer = self._round_observer
        if not candidates:
            candidates = observer.live_processes()
        turn = observer.turn(candidates, self._round, clock=self._clock)
        settings = self._settings
        longest_s = patience_s(
            grace_s=settings.grace_s,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            round_timeout_s=settings.round_timeout_s,
        )
        return Stage(turn, expected, began_s=self._clock.monotonic(), patience_s=longest_s)

    def _begin_commit_if_reduced(self) -> None:
        """Begin to wait for the commit, once the own part of the reduction is done."""
        plan = self._plan
        if plan is None or self._is_committing or self._must_reduce:
            return
        history = self._context.history
        history.candidates = tuple(
            Identity(replica=c.replica, incarnation=c.incarnation) for c in plan.contributions
        )
        own = self._round_observer.identity
        is_syncer = plan.mode == SYNCER and own.replica in plan.owners
        candidates = (own,) if is_syncer else history.candidates
        self._stage = self._begin_stage(candidates, history.commit)
        self._is_committing = True

    def _remember(self, now_s: float) -> None:
        """Record how long this exchange and its wait for the commit took."""
        history = self._context.history
        history.add(now_s - self._started_s)
        if self._is_committing:
            history.commit.add(max(0.0, self._came_s() - self._stage.began_s))

    def _require_own_record(self) -> None:
        """Repair this process's record if it is damaged; check that of an earlier process. A
        process that lists does the same. Raises :class:`ContributionLost`."""
        if self._sent is not None:
            if not self._is_checked:
                self._round_observer.repair(self._sent.record)
            self._is_checked = True
        elif self._earlier is not None and self._plan is None:
            self._require_readable(self._earlier)

    def _read_commit(self) -> tuple[Commit | None, Damaged | None]:
        """Return the round's commit, if there is one, and the error of a damaged plan or commit."""
        commit: Commit | None = None
        damaged: Damaged | None = None
        if self._plan_is_early:
            self._plan_is_early = False
        elif self._plan is None:
            try:
                self._found(self._round_observer.plan_of(self._round))
            except Damaged as error:
                damaged = error
        if self._commit_is_missing:
            self._commit_is_missing = False
        elif self._plan is not None or damaged is not None:
            try:
                commit = self._look_for_commit()
            except Damaged as error:
                damaged = error
        return commit, damaged

    def _look_for_commit(self) -> Commit | None:
        """Read the commit. In a small sharded round, list the reduced shards at the same time, and
        begin to read them once all are there."""
        plan, observer = self._plan, self._round_observer
        is_small = plan is not None and len(set(plan.owners)) <= READ_AHEAD_PAYLOADS
        if plan is None or not is_small or plan.mode != SHARDED or not self._is_committing:
            return observer.commit_of(self._round)
        is_due = self._stage.turn.is_due
        if self._has_committed or not (is_due or self._shard_looks):
            return observer.commit_of(self._round)
        self._shard_looks = max(0, self._shard_looks - 1)
        commit, reduced = run_both(
            lambda: observer.commit_of(self._round),
            lambda: observer.reduced_shards(plan, leases=is_due),
        )
        self._found_shards(plan, reduced)
        return commit

    def _found_shards(self, plan: Plan, reduced: dict[int, tuple[str, ...]]) -> None:
        """Note a listing of reduced shards, and read them ahead of the commit."""
        self._reduced = reduced
        if self._sent is not None and self._reduction_of(plan).read_ahead(reduced):
            self._shard_looks = 0

    def _await_readable(
        self, damaged: Damaged, commit: Commit | None, now_s: float
    ) -> Wait | MakeCommit:
        """Wait until a damaged plan or commit is readable; after a while, void an undecided round.
        A replica that has read the plan can commit the round first: one create succeeds.

        Raises :class:`CannotReduce` if the round is decided and cannot be read here, and
        :class:`Damaged` for the commit of the previous round.
        """
        if self._damaged_since_s is None:
            self._damaged_since_s = now_s
            log.error("%s", damaged)
        is_decided = commit is not None or damaged.key == keys.commit(self._round)
        if is_decided and now_s > self._damaged_since_s + DAMAGE_PATIENCE_S:
            raise CannotReduce(None, str(damaged))
        void_from_s = self._damaged_since_s + self._plan_wait_s
        if not is_decided and self._round_observer.can_create() and now_s > void_from_s:
            totals = self._round_observer.totals_before(self._round)
            if totals is not None:
                return MakeCommit(
                    void_unplanned(
                        self._round,
                        self._round_observer.fragment(self._round),
                        self._round_observer.identity,
                        reason=str(damaged),
                        totals=totals,
                        wall_s=self._clock.wall(),
                    )
                )
        return Wait(FAR, str(damaged))

    @property
    def _plan_wait_s(self) -> float:
        """Seconds of reading a damaged plan before this replica voids its round."""
        patience_s = self._settings.heartbeat_timeout_s + DAMAGE_PATIENCE_S
        limit_s = min(patience_s, self._settings.round_timeout_s / 2)
        return limit_s + STAGGER_S * self._stage.turn.place

    def _decide(self, now_s: float) -> Action:
        if self._plan is None:
            view = self._round_observer.before_plan(
                self._round,
                self._base,
                own=self._sent.record if self._sent else None,
                waited_s=now_s - self._started_s,
                sync_s=self._context.history.usual_s,
            )
            if self._earlier and self._round_observer.identity.replica not in view.contributions:
                self._require_readable(self._earlier)
        else:
            view = self._round_observer.after_plan(
                self._plan, self._base, merges=self._merges, reduced=self._reduced
            )
        wall_s = self._clock.wall()
        action, self._memory = decide(
            view, self._memory, now_s=now_s, wall_s=wall_s, stagger_s=STAGGER_S
        )
        is_arriving = self._plan is None and self._round_observer.expects_more
        if isinstance(action, Wait) and is_arriving:
            return replace(action, until_s=min(action.until_s, now_s + ARRIVAL_S))
        return action

    def _require_readable(self, earlier: Identity) -> None:
        """Read the record itself, because a listing can be stale and a single read damaged.
        Raises :class:`ContributionLost`."""
        if reason := self._round_observer.damage_of_contribution(self._round, earlier):
            raise ContributionLost(
                f"round {self._round}: an earlier process contributed, but {reason}"
            )

    def _act(self, action: Action) -> None:
        store = self._context.store
        match action:
            case MakePlan(plan):
                if store.create(keys.plan(plan.round), plan.to_bytes()):
                    self._plan_was_missing = True
                    self._found(plan)
                    self._round_observer.remember_plan(plan)
                for refusal in plan.refused:
                    log.warning(
                        "round %d: replica %d is not included (%s): %s",
                        plan.round,
                        refusal.replica,
                        refusal.kind,
                        refusal.reason,
                    )
            case Reduce(plan, shard):
                self._reduce(plan, shard)
                # Usually others still reduce, or wait for this process to commit.
                is_first = self._stage.turn.place == 0
                self._commit_is_missing = is_first or self._context.history.commit.is_longer(0.1)
            case ListShards(plan):
                self._found_shards(plan, self._round_observer.reduced_shards(plan))
                self._commit_is_missing = True
            case MakeCommit(commit):
                if store.create(keys.commit(commit.round), commit.to_bytes()):
                    self._round_observer.remember(commit)
                self._has_committed = True

    def _reduction_of(self, plan: Plan) -> Reduction:
        if self._reduction is None:
            own = self._sent.own if self._sent else None
            self._reduction = self._context.reduction(plan, self._timings, own)
        return self._reduction

    def _reduce(self, plan: Plan, shard: int) -> None:
        """Reduce a shard, with the other shards of this process if it is one of them."""
        own = shards_of(plan, self._round_observer.identity.replica)
        shards = [one for one in own if one not in self._merges] if shard in own else [shard]
        damage = ""
        if self._sent and self._is_included(plan):
            with self._timings.measure("upload"):
                damage = self._sent.damage()
        if damage:
            replica = self._round_observer.identity.replica
            failure = Merge(
                failure=f"payload of replica {replica}: {damage}", failed_replica=replica
            )
            self._merges |= dict.fromkeys(shards, failure)
            return
        reduction = self._reduction_of(plan)
        try:
            if plan.mode == GATHER:
                self._merged = reduction.gather()
                self._merges[WHOLE] = Merge(digest=self._merged.digest)
                return
            digests = reduction.store_shards(shards, listed=lambda: self._list_stored(plan))
            self._merges |= {one: Merge(digest=digest) for one, digest in digests.items()}
        except CannotReduce as error:
            log.error("round %d cannot be reduced: %s", plan.round, error)
            failure = Merge(failure=str(error), failed_replica=error.replica)
            self._merges |= dict.fromkeys(shards, failure)

    def _list_stored(self, plan: Plan) -> dict[int, tuple[str, ...]]:
        """List the reduced shards while this process stores its own; a process without contribution
        does not read them."""
        if self._sent is None:
            return {}
        listed = self._round_observer.reduced_shards(plan, leases=False)
        if all(len(listed.get(shard, ())) == 1 for shard in range(len(plan.owners))):
            self._reduced, self._shard_looks = listed, 0
        return listed

    def _is_included(self, plan: Plan) -> bool:
        """Return whether the plan includes this process's contribution."""
        return self._sent is not None and any(map(self._sent.own.matches, plan.contributions))

    def _result(self, commit: Commit) -> RoundResult:
        if self._sent is not None:  # no upload outlives its round
            try:
                self._sent.damage()
            except StoreError as error:  # the commit is decided; others have read the payload
                log.warning("round %d: the payload could not be read back: %s", self._round, error)
        plan = self._plan
        replica = self._round_observer.identity.replica
        refused = plan.refused if plan else ()
        refusal = next((r for r in refused if r.replica == replica), None)
        if plan is None or commit.void or self._sent is None:
            return RoundResult(commit=commit, plan=plan, merged=None, refusal=refusal)
        merged = self._merged
        if merged is None:
            merged = self._reduction_of(plan).committed(commit)
        compare_digests(commit, merged)
        cosine = self._cosine(plan, merged)
        return RoundResult(commit=commit, plan=plan, merged=merged, refusal=refusal, cosine=cosine)

    def _cosine(self, plan: Plan, merged: Merged) -> float | None:
        """Return the cosine of an included contribution. Computed here because the outer step
        modifies the merged vector; its duration counts as reduction."""
        if self._sent is None or not self._is_included(plan):
            return None
        return self._reduction_of(plan).cosine(merged)


def compare_digests(commit: Commit, merged: Merged) -> None:
    """Log a difference between the committed digest and this replica's.

    The mean is a function of the payloads, so this replica uses its own; comparing the digests of
    the weights later shows which of the two is wrong.
    """
    if merged.digest != commit.merged_digest:
        log.error(
            "round %d: expected merged digest %s as committed by replica %d, found %s",
            commit.round,
            commit.merged_digest,
            commit.committer.replica,
            merged.digest,
        )
