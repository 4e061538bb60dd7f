"""What one process sees of a round in the store, put together for the decision core.

Reads only. Records and commits never change once they are there, so each is read once; leases and
listings are read anew whenever a view is asked for.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from diloco.errors import RunOver
from diloco.membership.lease import Observer
from diloco.model.fragments import Slot, Table
from diloco.protocol import keys
from diloco.protocol.parallel_reads import read_each
from diloco.protocol.reading import READS, Damaged, read_record
from diloco.protocol.records import BadRecord, Commit, ContributionRecord, Identity, Plan
from diloco.protocol.round_view import MODES, Merge, RoundView, Totals
from diloco.protocol.settings import GroupSettings
from diloco.store.base import MissingKey, Store

log = logging.getLogger(__name__)

REFUSED_EVERY = 10
"""A contribution record that was refused :data:`READS` times is read at every tenth list, because
its writer, when it lists, writes it again."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """What a pseudo-gradient was taken from: the newest committed round of the fragment and the
    digest of its weights."""

    round: int
    digest: str


class Sight:
    """``committer`` names the only replica that may create, on a store without atomic create."""

    def __init__(
        self,
        store: Store,
        identity: Identity,
        settings: GroupSettings,
        *,
        observer: Observer,
        model_hash: str,
        table: Table,
        committer: Callable[[], int | None],
    ) -> None:
        self._store = store
        self._identity = identity
        self._settings = settings
        self._observer = observer
        self._model_hash = model_hash
        self._table = table
        self._committer = committer
        self._records: dict[str, ContributionRecord] = {}
        self._refusals: Counter[str] = Counter()
        self._commits: dict[int, Commit] = {}

    def fragment(self, round: int) -> int:
        return (round - 1) % self._table.fragments

    def slots(self, round: int) -> tuple[Slot, ...]:
        return self._table.slots_of(self.fragment(round))

    def may_create(self) -> bool:
        """Whether this process may create plans and commits."""
        return self._committer() in (None, self._identity.replica)

    # -- the log ---------------------------------------------------------------------------------

    def commit_of(self, round: int) -> Commit | None:
        """The commit of a round, None if there is none yet.

        Raises :class:`~diloco.protocol.reading.Damaged`.
        """
        commit = self._commits.get(round)  # once: another thread may forget it meanwhile
        if commit is None:
            try:
                commit = read_record(
                    self._store, keys.commit(round), Commit, is_right=lambda c: c.round == round
                )
            except MissingKey:
                return None
            self._commits[round] = commit
        return commit

    def remember(self, commit: Commit) -> None:
        """This process has just made it: it need not be read."""
        self._commits[commit.round] = commit

    def known_commits(self) -> tuple[Commit, ...]:
        """Those that this process has made or read, of its last rounds."""
        return tuple(self._commits.values())

    def plan_of(self, round: int) -> Plan | None:
        """The plan of a round, None if there is none yet.

        Raises :class:`~diloco.protocol.reading.Damaged`.
        """
        try:
            plan = read_record(
                self._store, keys.plan(round), Plan, is_right=lambda p: p.round == round
            )
        except MissingKey:
            return None
        if plan.mode not in MODES:
            raise BadRecord(
                f"round {round}: expected a plan mode of {', '.join(MODES)}, found {plan.mode!r}"
            )
        return plan

    def totals_before(self, round: int) -> Totals | None:
        """Counts up to the commit before a round; None while it is not there.

        Raises :class:`~diloco.errors.RunOver` if that commit was the last.
        """
        if round == 1:
            return Totals()
        before = self.commit_of(round - 1)
        if before is None:
            return None
        if before.last:
            raise RunOver(f"round {before.round} was the last")
        return Totals(committed=before.committed_total, tokens=before.tokens_total)

    def forget_before(self, round: int) -> None:
        """Drop records and commits of earlier rounds from memory."""
        self._records = {k: r for k, r in list(self._records.items()) if r.round >= round}
        self._commits = {r: c for r, c in list(self._commits.items()) if r >= round - 2}
        first = keys.contributions(round)  # keys are in the order of their rounds
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
        """Leases and contributions: lists both. ``own`` is this replica's own contribution, which
        is written again if the stored record is damaged.

        Leases first: one that says its replica is past this round is then followed by a listing
        that shows what the replica contributed before it said so.
        """
        known = {r.replica for r in list(self._records.values()) if r.round == round}
        self._observer.look(skip=frozenset(known))
        contributions = self._contributions(round, own)
        return replace(
            self._view(round, base),
            contributions=contributions,
            expected=self._observer.working_towards(round),
            live=self._observer.live(),
            syncers=self._observer.syncers(),
            shunned=self._shunned(round),
            waited_s=waited_s,
            sync_s=sync_s,
        )

    def after_plan(
        self,
        plan: Plan,
        base: Base,
        *,
        merges: Mapping[int, Merge],
        reduced: Mapping[int, tuple[str, ...]] | None,
    ) -> RoundView:
        """With the plan and what was reduced of it; lists nothing.

        An owner whose process was followed by another is not live: the new one is in a later part
        of the log, and nobody waits for it here.
        """
        followed = {
            c.replica
            for c in plan.contributions
            if self._observer.is_gone(Identity(replica=c.replica, incarnation=c.incarnation))
        }
        return replace(
            self._view(plan.round, base),
            totals=self.totals_before(plan.round),
            live=(self._observer.live() - followed) | self._observer.syncers(),
            plan=plan,
            merges=merges,
            reduced=reduced,
        )

    def _shunned(self, round: int) -> int | None:
        """Who voided both rounds before this one: without it the run would stand still for ever.
        Unknown (None) where one of their commits is damaged."""
        if round < 3:
            return None
        try:
            before = [self.commit_of(round - 1), self.commit_of(round - 2)]
        except Damaged:
            return None
        culprits = {commit.void_replica if commit and commit.void else None for commit in before}
        return culprits.pop() if len(culprits) == 1 else None

    def _view(self, round: int, base: Base) -> RoundView:
        slots = self.slots(round)
        return RoundView(
            round=round,
            fragment=self.fragment(round),
            me=self._identity,
            settings=self._settings,
            model_hash=self._model_hash,
            numel=slots[-1].stop - slots[0].offset,
            tensors=len(slots),
            base_round=base.round,
            base_digest=base.digest,
            totals=None,
            committer=self._committer(),
        )

    def _contributions(
        self, round: int, own: ContributionRecord | None
    ) -> dict[int, ContributionRecord]:
        """The highest incarnation's record of each replica."""
        listed = [info.key for info in self._store.list(keys.contributions(round))]
        named = {key: who for key in listed if (who := keys.parse_contribution_record(key))}
        known = {key: record for key in named if (record := self._records.get(key))}
        wanted = [key for key in named if key not in known and self._is_to_be_read(key)]
        # A store may list what it does not yet show: that is looked for again next time.
        for key, read in read_each(self._store, ContributionRecord, wanted).items():
            if isinstance(read, ContributionRecord):
                if (read.round, read.replica, read.incarnation) == named[key]:
                    self._records[key] = known[key] = read
                    continue
                read = BadRecord(f"expected the record of {named[key]}, found another's")
            if isinstance(read, BadRecord):
                log.warning("round %d: %s is refused: %s", round, key, read)
                self._refusals[key] += 1
                if own and named[key][1:] == (own.replica, own.incarnation):
                    self._store.put(key, own.to_bytes())
        # Sorted by incarnation: the last one of a replica is the highest.
        return {known[key].replica: known[key] for key in named if key in known}

    def _is_to_be_read(self, key: str) -> bool:
        """Whether a record that is not known yet is read at this list."""
        refusals = self._refusals[key]
        if refusals < READS:
            return True
        self._refusals[key] += 1
        return refusals % REFUSED_EVERY == 0

    def damage_of_contribution(self, round: int, who: Identity) -> str:
        """Why the record of a contribution cannot be read; '' if it can."""
        key = keys.contribution_record(round, who.replica, who.incarnation)
        wanted = (round, who.replica, who.incarnation)
        try:
            read_record(
                self._store, key, ContributionRecord,
                is_right=lambda c: (c.round, c.replica, c.incarnation) == wanted,
            )  # fmt: skip
        except Damaged as error:
            return str(error)
        except MissingKey:
            return f"{key} is missing"
        return ""

    def reduced_shards(self, round: int) -> dict[int, tuple[str, ...]]:
        """Shard -> the digests of what lies there; lists the reduced objects and the leases."""
        self._observer.look()
        found: dict[int, tuple[str, ...]] = {}
        for info in self._store.list(keys.reduced(round)):
            parsed = keys.parse_reduced_shard(info.key)
            if parsed is not None:
                found[parsed[1]] = (*found.get(parsed[1], ()), parsed[2])
        return found
