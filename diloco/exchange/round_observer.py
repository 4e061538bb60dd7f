"""One process's view of a round in the store, assembled for the decision core.

Reads only. Records and commits never change once they exist, so each is read once; leases and
listings are read again for every view.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from diloco.clock import Clock
from diloco.errors import RunOver
from diloco.exchange.waiting import Turn
from diloco.membership.lease import Lease
from diloco.membership.observer import Observer
from diloco.model.fragments import Slot, Table
from diloco.protocol import keys
from diloco.protocol.parallel_reads import read_each, run_both
from diloco.protocol.reading import READS, Damaged, read_record
from diloco.protocol.records import BadRecord, Commit, ContributionRecord, Identity, Plan
from diloco.protocol.round_view import GATHER, MODES, Merge, RoundView, Totals
from diloco.protocol.settings import GroupSettings
from diloco.store.base import MissingKey, Store

log = logging.getLogger(__name__)

READ_AHEAD = 16
"""Commits that a replica reads at once when it catches up."""
GETS_OF_A_LISTING = 12
"""Reads that cost as much as one listing."""
REFUSED_EVERY = 10
"""A contribution record that was refused :data:`READS` times is read at every tenth listing only,
because its writer rewrites it when it lists."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """The newest committed round of a fragment and the digest of its weights: the base of a
    pseudo-gradient."""

    round: int
    digest: str


class RoundObserver:
    """Reads plans, commits, contributions and leases for one process, whose ``lease`` has its
    identity.

    On a store without a conditional write the lease names the coordinator, the only process that
    can create plans and commits.
    """

    def __init__(
        self,
        store: Store,
        settings: GroupSettings,
        *,
        lease: Lease,
        observer: Observer,
        model_hash: str,
        table: Table,
    ) -> None:
        self.identity = lease.identity
        self._store = store
        self._lease = lease
        self._settings = settings
        self._observer = observer
        self._model_hash = model_hash
        self._table = table
        self._records: dict[str, ContributionRecord] = {}
        self._refusals: Counter[str] = Counter()
        self._commits: dict[int, Commit] = {}
        self._looked = (0, 0.0)
        """The round in which the leases were last read, and how long it had waited."""
        self._arriving_round = 0
        self.expects_more = False
        """Whether the last view of a round has no leases, because contributions still arrive."""
        self._listed_plan = 0
        """The round whose reduced shards were listed last."""
        self._plans: dict[int, Plan | None] = {}

    def fragment(self, round: int) -> int:
        """Return the index of the fragment that a round exchanges."""
        return (round - 1) % self._table.fragments

    def slots(self, round: int) -> tuple[Slot, ...]:
        """Return the tensors of the fragment that a round exchanges."""
        return self._table.slots_of(self.fragment(round))

    def can_create(self) -> bool:
        """Return whether this process can create plans and commits."""
        return self._coordinator in (None, self.identity.replica)

    @property
    def is_coordinator(self) -> bool:
        """Whether this process creates plans and commits for all; a command can change it during a
        round."""
        return self._coordinator == self.identity.replica

    @property
    def _coordinator(self) -> int | None:
        """The only replica that can create objects; None if the store has a conditional write."""
        return None if self._store.atomic_create else self._lease.committer

    def live_processes(self) -> tuple[Identity, ...]:
        """Read all leases and return the live replicas' processes in the order of their numbers."""
        self._observer.look()
        return self._observer.processes()

    def turn(self, candidates: Sequence[Identity], round: int, *, clock: Clock) -> Turn:
        """Return whether it is this process's turn to list in one stage of a round."""
        return Turn(
            self._observer,
            candidates,
            self.identity,
            round,
            clock=clock,
            timeout_s=self._settings.heartbeat_timeout_s,
        )

    # -- the log ---------------------------------------------------------------------------------

    def commit_of(self, round: int) -> Commit | None:
        """Return the commit of a round, None if there is none yet.

        Raises :class:`~diloco.protocol.reading.Damaged`.
        """
        commit = self._commits.get(round)  # one read: another thread can drop it meanwhile
        if commit is None:
            try:
                commit = read_record(
                    self._store, keys.commit(round), Commit, is_right=lambda c: c.round == round
                )
            except MissingKey:
                return None
            self._commits[round] = commit
        return commit

    def read_ahead(self, round: int) -> None:
        """Read the commits from ``round`` on in parallel, at most :data:`READ_AHEAD`, for a replica
        that applies many. Only those up to the first missing or damaged one are cached."""
        numbers = range(round, round + READ_AHEAD)
        found = read_each(self._store, Commit, [keys.commit(number) for number in numbers])
        for number in numbers:
            commit = found.get(keys.commit(number))
            if not isinstance(commit, Commit) or commit.round != number:
                return
            self._commits[number] = commit

    def remember(self, commit: Commit) -> None:
        """Cache a commit that this process has just created."""
        self._commits[commit.round] = commit

    def known_commits(self) -> tuple[Commit, ...]:
        """Return the cached commits of the latest rounds."""
        return tuple(self._commits.values())

    def plan_of(self, round: int) -> Plan | None:
        """Return the plan of a round, None if there is none yet.

        Raises :class:`~diloco.protocol.reading.Damaged`, also for a plan that no planner makes.
        """
        try:
            plan = read_record(
                self._store, keys.plan(round), Plan, is_right=lambda p: p.round == round
            )
        except MissingKey:
            return None
        if problem := _refusal(plan):
            raise Damaged(keys.plan(round), problem)
        self._plans[round] = plan
        return plan

    def remember_plan(self, plan: Plan) -> None:
        """Cache a plan that this process has just created."""
        self._plans[plan.round] = plan

    def known_plan(self, round: int) -> Plan | None:
        """Return the plan of a round if this process has read or created it."""
        return self._plans.get(round)

    def known_plan_before(self, round: int) -> Plan | None:
        """Return the newest plan of an earlier round that this process has read or created."""
        known = [plan for r, plan in list(self._plans.items()) if plan and r < round]
        return max(known, key=lambda plan: plan.round, default=None)

    def _newest_plan_before(self, round: int) -> Plan | None:
        """Return the newest known plan of an earlier round; reads the previous round's once. A
        damaged plan is unknown."""
        if round > 1 and round - 1 not in self._plans:
            self._plans[round - 1] = None
            with contextlib.suppress(Damaged):
                self.plan_of(round - 1)
        return self.known_plan_before(round)

    def totals_before(self, round: int) -> Totals | None:
        """Return the counts up to the commit before a round; None while there is no such commit.

        Raises :class:`~diloco.errors.RunOver` if that commit was the last.
        """
        if round == 1:
            return Totals()
        previous = self.commit_of(round - 1)
        if previous is None:
            return None
        if previous.last:
            raise RunOver(f"round {previous.round} was the last")
        return Totals(committed=previous.committed_total, tokens=previous.tokens_total)

    def forget_before(self, round: int) -> None:
        """Drop cached records, plans and commits of earlier rounds."""
        self._records = {k: r for k, r in list(self._records.items()) if r.round >= round}
        self._commits = {r: c for r, c in list(self._commits.items()) if r >= round - 2}
        self._plans = {r: p for r, p in list(self._plans.items()) if r >= round - 2}
        first = keys.contributions(round)  # keys sort by round
        self._refusals = Counter({k: n for k, n in list(self._refusals.items()) if k >= first})

    # -- views -----------------------------------------------------------------------------------

    def before_plan(
        self,
        round: int,
        base: Base,
        *,
        own: ContributionRecord | None = None,
        waited_s: float,
        sync_s: float,
    ) -> RoundView:
        """Return the view of a round without a plan; lists leases and contributions.

        ``own`` is this replica's contribution, which is rewritten if the stored record is damaged.
        """
        contributions = self._look(round, own, waited_s)
        expected = self._observer.working_towards(round)
        if not self.expects_more:
            self._observer.ask(expected - contributions.keys() - {self.identity.replica})
        return replace(
            self._view(round, base),
            contributions=contributions,
            expected=expected,
            suspected=self._observer.suspected(),
            live=self._observer.live(),
            syncers=self._observer.syncers(),
            excluded_replica=self._excluded_replica(round),
            previous=self._newest_plan_before(round),
            waited_s=waited_s,
            sync_s=sync_s,
        )

    def _look(
        self, round: int, own: ContributionRecord | None, waited_s: float
    ) -> dict[int, ContributionRecord]:
        """List the contributions, and read the leases of the other replicas, if that is due.

        Leases are read at most once per heartbeat interval in a round, because they do not change
        more often, and at the same time as the contributions. If a lease shows that its replica has
        gone on to a later round or has left, a listing that begins later includes the contribution
        that it made before.

        A lease that is read costs a request and a contribution that has arrived makes it needless.
        So if many are missing, they are listed before. The first process of a round finds hardly
        any contribution: below the quorum it can only wait, and reads the leases at its next look.
        """
        looked_round, looked_s = self._looked
        self.expects_more = False
        if round == looked_round and 0 <= waited_s - looked_s < self._lease.interval_s:
            return self._contributions(round, own)
        if self._missing(round) > GETS_OF_A_LISTING:
            arrived = self._contributions(round, own)
            is_first = round not in (looked_round, self._arriving_round)
            if is_first and len(arrived) < self._settings.min_quorum:
                self._arriving_round, self.expects_more = round, True
                return arrived
        known, expected = self._known(round), self._observer.working_towards(round)
        ended, contributions = run_both(
            lambda: self._observer.look(skip=known), lambda: self._contributions(round, own)
        )
        self._looked = (round, waited_s)
        working = self._observer.working_towards(round)
        gone_on = self._observer.past(round) | ended | (expected - working)
        if gone_on - contributions.keys():
            return self._contributions(round, own)
        return contributions

    def _missing(self, round: int) -> int:
        """Return how many replicas have not contributed when the round was last listed; before the
        first look all of the group."""
        if round != self._looked[0]:
            return self._settings.num_replicas
        return len(self._observer.working_towards(round) - self._known(round))

    def _known(self, round: int) -> set[int]:
        """Return the replicas whose record of a round has been read."""
        return {record.replica for record in list(self._records.values()) if record.round == round}

    def after_plan(
        self,
        plan: Plan,
        base: Base,
        *,
        merges: Mapping[int, Merge],
        reduced: Mapping[int, tuple[str, ...]] | None,
    ) -> RoundView:
        """Return the view of a planned round; lists nothing.

        An owner whose process has been replaced by a newer incarnation is not live: the new process
        works on a later round, so no replica waits for it in this one.
        """
        replaced = {
            c.replica
            for c in plan.contributions
            if self._observer.is_gone(Identity(replica=c.replica, incarnation=c.incarnation))
        }
        return replace(
            self._view(plan.round, base),
            totals=self.totals_before(plan.round),
            live=(self._observer.live() - replaced) | self._observer.syncers(),
            plan=plan,
            merges=merges,
            reduced=reduced,
        )

    def _excluded_replica(self, round: int) -> int | None:
        """Return the replica that voided both previous rounds: without excluding it the run would
        never advance. None if one of their commits is damaged."""
        if round < 3:
            return None
        try:
            previous = [self.commit_of(round - 1), self.commit_of(round - 2)]
        except Damaged:
            return None
        void_replicas = {
            commit.void_replica if commit and commit.void else None for commit in previous
        }
        return void_replicas.pop() if len(void_replicas) == 1 else None

    def _view(self, round: int, base: Base) -> RoundView:
        slots = self.slots(round)
        return RoundView(
            round=round,
            fragment=self.fragment(round),
            me=self.identity,
            settings=self._settings,
            model_hash=self._model_hash,
            numel=slots[-1].stop - slots[0].offset,
            tensors=len(slots),
            base_round=base.round,
            base_digest=base.digest,
            totals=None,
            committer=self._coordinator,
        )

    def _contributions(
        self, round: int, own: ContributionRecord | None
    ) -> dict[int, ContributionRecord]:
        """Return the record of each replica's newest incarnation."""
        listed = [info.key for info in self._store.list(keys.contributions(round))]
        named = {
            key: identity for key in listed if (identity := keys.parse_contribution_record(key))
        }
        known = {key: record for key in named if (record := self._records.get(key))}
        missing = [key for key in named if key not in known and self._should_read(key)]
        # A store can list an object that it does not return yet: the next listing tries again.
        for key, result in read_each(self._store, ContributionRecord, missing).items():
            if isinstance(result, ContributionRecord):
                if (result.round, result.replica, result.incarnation) == named[key]:
                    self._records[key] = known[key] = result
                    continue
                result = BadRecord(f"expected the record of {named[key]}, found another")
            if isinstance(result, BadRecord):
                log.warning("round %d: %s is refused: %s", round, key, result)
                self._refusals[key] += 1
                if own and named[key][1:] == (own.replica, own.incarnation):
                    self._store.put(key, own.to_bytes())
        # Sorted by incarnation: the last one of a replica is the newest.
        return {known[key].replica: known[key] for key in named if key in known}

    def contributors(self, round: int) -> frozenset[Identity]:
        """Return the processes with a contribution record in a round, readable or not; one list."""
        listed = self._store.list(keys.contributions(round))
        parsed = (keys.parse_contribution_record(info.key) for info in listed)
        return frozenset(
            Identity(replica=names[1], incarnation=names[2]) for names in parsed if names
        )

    def _should_read(self, key: str) -> bool:
        """Return whether this listing reads a record that is not cached."""
        refusals = self._refusals[key]
        if refusals < READS:
            return True
        self._refusals[key] += 1
        return refusals % REFUSED_EVERY == 0

    def repair(self, own: ContributionRecord) -> None:
        """Write the record of this process's contribution again if the stored one is damaged."""
        if self.damage_of_contribution(own.round, self.identity):
            key = keys.contribution_record(own.round, own.replica, own.incarnation)
            self._store.put(key, own.to_bytes())

    def damage_of_contribution(self, round: int, identity: Identity) -> str:
        """Return why the record of a contribution cannot be read; '' if it can."""
        key = keys.contribution_record(round, identity.replica, identity.incarnation)
        missing = (round, identity.replica, identity.incarnation)
        try:
            read_record(
                self._store,
                key,
                ContributionRecord,
                is_right=lambda c: (c.round, c.replica, c.incarnation) == missing,
            )
        except Damaged as error:
            return str(error)
        except MissingKey:
            return f"{key} is missing"
        return ""

    def reduced_shards(self, plan: Plan, *, leases: bool = True) -> dict[int, tuple[str, ...]]:
        """Return the digests of the stored objects by shard; lists the reduced objects, and reads
        the ``leases`` of the owners whose shard is missing from the second listing on, because most
        shards arrive soon."""
        digests: dict[int, tuple[str, ...]] = {}
        for info in self._store.list(keys.reduced(plan.round)):
            parsed = keys.parse_reduced_shard(info.key)
            if parsed is not None:
                digests[parsed[1]] = (*digests.get(parsed[1], ()), parsed[2])
        missing = {owner for shard, owner in enumerate(plan.owners) if shard not in digests}
        is_first, self._listed_plan = self._listed_plan != plan.round, plan.round
        if missing and leases and not is_first:
            self._observer.look(only=missing)
        return digests


def _refusal(plan: Plan) -> str:
    """Return why a plan cannot be carried out; '' if it can."""
    if plan.mode not in MODES:
        return f"expected a plan mode of {', '.join(MODES)}, found {plan.mode!r}"
    if plan.mode != GATHER and not plan.owners:
        return f"expected owners of the shards in mode {plan.mode}, found none"
    weights = [planned.weight for planned in plan.contributions]
    if not weights or not all(0 < weight <= 1 for weight in weights):
        found = next((weight for weight in weights if not 0 < weight <= 1), "no contribution")
        return f"expected a plan of contributions with weights above 0, up to 1, found {found}"
    return ""
