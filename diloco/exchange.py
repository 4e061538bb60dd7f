"""The I/O of one round: contribute, settle, replay.

Contribute uploads the payload, then the record that names it (I2). Settle polls: a follower GETs
the one key it waits for; only the replica whose turn it is lists contributions, leases and reduced
shards. What to do next is always asked of :func:`diloco.rendezvous.rounds.decide`.

Several rounds may be settled at once, each in a thread of its own (overlap).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from diloco.codecs import get_codec
from diloco.errors import RoundTimeout, RunOver
from diloco.fragments import Slot, Table
from diloco.membership import Observer
from diloco.reduce import CannotReduce, Merged, Own, Reducer
from diloco.rendezvous import keys
from diloco.rendezvous.clock import Clock
from diloco.rendezvous.records import (
    BadRecord,
    Commit,
    ContributionRecord,
    Identity,
    Plan,
    Refusal,
)
from diloco.rendezvous.rounds import decide
from diloco.rendezvous.settings import GroupSettings
from diloco.rendezvous.store import MissingKey, Store
from diloco.rendezvous.view import (
    GATHER,
    MODES,
    WHOLE,
    Look,
    MakeCommit,
    MakePlan,
    Memory,
    Merge,
    Reduce,
    RoundView,
    Totals,
    Wait,
)
from diloco.wire import Packing, PayloadInfo

log = logging.getLogger(__name__)

STAGGER_S = 1.0
"""Pause between the turns of two candidates for a plan or a commit."""
FIRST_POLL_S = 0.03
LONGEST_POLL_S = 1.0
POLLS_PER_WAIT = 8
"""How often a follower looks while it waits as long as it usually does."""
MEMORY = 0.7
"""Weight of the past in the running mean of how long exchanges take."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """What a pseudo-gradient was taken from: the newest committed round of the fragment and the
    digest of its weights."""

    round: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """What a replica did since its base; ``loss`` is the mean over its steps. ``new_tokens`` are
    those that no earlier contribution of its has counted."""

    tokens: int
    new_tokens: int
    steps: int
    loss: float
    compute_s: float


@dataclass
class Timings:
    """Seconds of the phases of one exchange, by name of :data:`telemetry.PHASES`."""

    clock: Clock
    seconds: dict[str, float] = field(default_factory=dict)

    def time(self, phase: str, operation: Callable[[], object]) -> None:
        start = self.clock.monotonic()
        try:
            operation()
        finally:
            self.add(phase, self.clock.monotonic() - start)

    def add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A contribution that is durable, with the vector that was encoded, for this replica's own
    part of the reduction."""

    record: ContributionRecord
    own: Own


@dataclass(frozen=True, kw_only=True)
class Settled:
    """How a round ended. ``merged`` is None for a void round; ``refusal`` says why the planner did
    not let this replica's contribution in, if it said so."""

    commit: Commit
    plan: Plan
    merged: Merged | None
    refusal: Refusal | None = None


@dataclass
class _Course:
    """Where one settling stands."""

    memory: Memory = field(default_factory=Memory)
    plan: Plan | None = None
    merges: dict[int, Merge] = field(default_factory=dict)
    merged: Merged | None = None
    reduced: dict[int, tuple[str, ...]] | None = None


class Exchange:
    """One process's side of every round.

    ``check`` is called while waiting and raises to leave (stop, fence). ``on_wait`` is told, for
    people, what is being waited for. ``committer`` names the only replica that may create, where
    the store has no atomic create.
    """

    def __init__(
        self,
        store: Store,
        identity: Identity,
        settings: GroupSettings,
        *,
        clock: Clock,
        observer: Observer,
        model_hash: str,
        table: Table,
        check: Callable[[], None],
        on_wait: Callable[[str], None] = lambda why: None,
        committer: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._store = store
        self._identity = identity
        self._settings = settings
        self._clock = clock
        self._observer = observer
        self._model_hash = model_hash
        self._table = table
        self._check = check
        self._on_wait = on_wait
        self._committer = committer
        self._codec = get_codec(settings.codec, topk=settings.topk)
        self._reducer = Reducer(store, settings, clock)
        self._records: dict[str, ContributionRecord] = {}
        self._refused_keys: set[str] = set()
        self._usual_s = 0.0
        self._commits: dict[int, Commit] = {}
        self._lock = threading.Lock()

    def slots(self, round: int) -> tuple[Slot, ...]:
        return self._table.slots_of(self.fragment(round))

    def fragment(self, round: int) -> int:
        return (round - 1) % self._table.fragments

    # -- contribute ------------------------------------------------------------------------------

    def contribute(
        self,
        round: int,
        *,
        base: Base,
        vector: Tensor,
        work: LocalWork,
        rounds_here: int,
        timings: Timings,
    ) -> Sent:
        """Encode and upload ``vector`` (n,) fp32, the fragment's pseudo-gradient, then its record.

        Encoding and uploading go on side by side; the time of the former is not told apart.
        """
        who = {"replica": self._identity.replica, "incarnation": self._identity.incarnation}
        where = {"round": round, "fragment": self.fragment(round)}
        form = {"codec": self._codec.name, "numel": vector.numel()}
        packing = Packing(
            PayloadInfo(**where, **who, **form),  # type: ignore[arg-type]
            vector,
            self._codec,
            self.slots(round),
        )
        key = (round, self._identity.replica, self._identity.incarnation)

        def upload() -> None:
            self._store.put_stream(keys.contribution_payload(*key), packing.parts)

        timings.time("upload", upload)
        record = ContributionRecord(
            **where,  # type: ignore[arg-type]
            **who,  # type: ignore[arg-type]
            **form,  # type: ignore[arg-type]
            base_round=base.round,
            base_digest=base.digest,
            model_hash=self._model_hash,
            tokens=work.tokens,
            new_tokens=work.new_tokens,
            steps=work.steps,
            loss=work.loss,
            norm=packing.norm,
            norms=packing.norms,
            size_bytes=packing.size_bytes,
            digest=packing.digest,
            checksums=packing.checksums,
            compute_s=work.compute_s,
            encode_s=packing.encode_s(self._clock),
            rounds_here=rounds_here,
            wall_s=self._clock.wall(),
        )
        data = record.to_bytes()
        timings.time("upload", lambda: self._store.put(keys.contribution_record(*key), data))
        return Sent(record=record, own=Own(digest=packing.digest, vector=vector))

    # -- the log ---------------------------------------------------------------------------------

    def commit_of(self, round: int) -> Commit | None:
        """The commit of a round, None if there is none yet."""
        if round not in self._commits:
            try:
                self._commits[round] = Commit.from_bytes(self._store.get(keys.commit(round)))
            except MissingKey:
                return None
        return self._commits[round]

    def replay(self, commit: Commit) -> Merged | None:
        """The merged mean of a round that was committed without this replica; None if void.

        Raises :class:`CannotReduce` if its payloads have been swept.
        """
        if commit.void:
            return None
        plan = Plan.from_bytes(self._store.get(keys.plan(commit.round)))
        slots = self.slots(commit.round)
        merged = self._reducer.committed(plan, commit, slots, None, self._reducer.meter())
        self._compare(commit, merged)
        return merged

    def forget_before(self, round: int) -> None:
        """Drop records and commits of earlier rounds from memory."""
        self._records = {k: r for k, r in self._records.items() if r.round >= round}
        self._commits = {r: c for r, c in self._commits.items() if r >= round - 1}

    def _totals_before(self, round: int, totals: Totals) -> Totals | None:
        """Counts up to the commit before; None while it is not there. ``totals`` are those of the
        caller's own position, which may lie further back. Raises :class:`RunOver`."""
        before = self.commit_of(round - 1) if round > 1 else None
        if round > 1 and before is None:
            return None
        if before is None:
            return totals
        if before.last:
            raise RunOver(f"round {before.round} was the last")
        return Totals(committed=before.committed_total, tokens=before.tokens_total)

    # -- settle ----------------------------------------------------------------------------------

    def settle(
        self, round: int, *, base: Base, sent: Sent | None, timings: Timings
    ) -> Settled:
        """Wait for the round's commit, doing whatever it needs when nobody else does.

        Raises :class:`RoundTimeout` after ``round_timeout_s``, :class:`RunOver` when an earlier
        round turns out to be the last, :class:`CannotReduce` where a committed round cannot be
        read here, and whatever ``check`` raises.
        """
        started_s = self._clock.monotonic()
        deadline_s = started_s + self._settings.round_timeout_s
        # Followers list only when the replica whose turn it is does not seem to act.
        list_from_s = started_s + self._patience_s()
        course = _Course()
        poll_s = FIRST_POLL_S
        while True:
            self._check()
            commit = self.commit_of(round) if course.plan is not None else None
            if commit is None and course.plan is None:
                course.plan = self._plan_of(round)
            if commit is not None:
                self._remember(self._clock.monotonic() - started_s)
                return self._settled(commit, course, sent, timings)
            action: object = Wait(0.0, "the plan")
            now_s = self._clock.monotonic()
            if course.plan is not None or now_s >= list_from_s:
                view = self._view(round, base, course, waited_s=now_s - started_s)
                action, course.memory = decide(
                    view,
                    course.memory,
                    now_s=now_s,
                    wall_s=self._clock.wall(),
                    stagger_s=STAGGER_S,
                )
            if not isinstance(action, Wait):
                self._act(action, course, sent, timings)
                poll_s = FIRST_POLL_S
                continue
            self._on_wait(action.why)
            if now_s > deadline_s:
                raise RoundTimeout(
                    f"round {round}: expected a commit within "
                    f"{self._settings.round_timeout_s:g} s, found none ({action.why})"
                )
            course.reduced = None
            timings.time("wait", lambda: self._clock.sleep(poll_s))  # noqa: B023
            poll_s = min(self._longest_poll_s(), poll_s * 1.4)

    def _act(self, action: object, course: _Course, sent: Sent | None, timings: Timings) -> None:
        match action:
            case MakePlan(plan):
                self._store.create(keys.plan(plan.round), plan.to_bytes())
                for out in plan.refused:
                    log.warning(
                        "round %d: replica %d is not in it (%s): %s",
                        plan.round, out.replica, out.kind, out.reason,
                    )  # fmt: skip
            case Reduce(plan, shard):
                self._reduce(plan, shard, course, sent, timings)
            case Look(plan):
                course.reduced = self._reduced_shards(plan.round)
                self._observer.look()
            case MakeCommit(commit):
                self._store.create(keys.commit(commit.round), commit.to_bytes())

    def _reduce(
        self, plan: Plan, shard: int, course: _Course, sent: Sent | None, timings: Timings
    ) -> None:
        slots, own, meter = self.slots(plan.round), sent and sent.own, self._reducer.meter()
        try:
            if plan.mode == GATHER:
                course.merged = self._reducer.gather(plan, slots, own, meter)
                course.merges[WHOLE] = Merge(digest=course.merged.digest)
            else:
                found = self._reducer.store_shard(plan, shard, slots, own, meter)
                course.merges[shard] = Merge(digest=found)
        except CannotReduce as error:
            log.error("round %d cannot be reduced: %s", plan.round, error)
            course.merges[shard] = Merge(failure=str(error), failed_replica=error.replica)
        timings.add("download", meter.download_s)
        timings.add("reduce", meter.total_s - meter.download_s)

    def _settled(
        self, commit: Commit, course: _Course, sent: Sent | None, timings: Timings
    ) -> Settled:
        plan = course.plan
        assert plan is not None, "a commit follows a plan"
        refusal = next((r for r in plan.refused if r.replica == self._identity.replica), None)
        if commit.void or sent is None:
            return Settled(commit=commit, plan=plan, merged=None, refusal=refusal)
        merged = course.merged
        if merged is None:
            meter = self._reducer.meter()
            slots = self.slots(commit.round)
            merged = self._reducer.committed(plan, commit, slots, sent.own, meter)
            timings.add("download", meter.download_s)
            timings.add("reduce", meter.total_s - meter.download_s)
        self._compare(commit, merged)
        return Settled(commit=commit, plan=plan, merged=merged, refusal=refusal)

    def _compare(self, commit: Commit, merged: Merged) -> None:
        if merged.digest != commit.merged_digest:
            log.error(
                "round %d: expected merged digest %s as committed by replica %d, found %s",
                commit.round, commit.merged_digest, commit.committer.replica, merged.digest,
            )  # fmt: skip

    # -- what this process sees ------------------------------------------------------------------

    def _plan_of(self, round: int) -> Plan | None:
        try:
            plan = Plan.from_bytes(self._store.get(keys.plan(round)))
        except MissingKey:
            return None
        if plan.mode not in MODES:
            raise BadRecord(
                f"round {round}: expected a plan mode of {', '.join(MODES)}, found {plan.mode!r}"
            )
        return plan

    def _view(self, round: int, base: Base, course: _Course, *, waited_s: float) -> RoundView:
        slots = self.slots(round)
        view = RoundView(
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
            waited_s=waited_s,
            sync_s=self._usual_s,
            plan=course.plan,
            merges=course.merges,
            reduced=course.reduced,
            committer=self._committer(),
        )
        if course.plan is not None:
            totals = self._totals_before(round, Totals())
            return replace(view, totals=totals, live=self._live())
        contributions = self._contributions(round)
        self._observer.look(skip=frozenset(contributions))
        return replace(
            view,
            contributions=contributions,
            expected=self._observer.working_towards(round),
            live=self._live(),
            syncers=self._observer.syncers(),
        )

    def _live(self) -> frozenset[int]:
        return self._observer.live() | self._observer.syncers()

    def _contributions(self, round: int) -> dict[int, ContributionRecord]:
        """The highest incarnation's record of each replica; each record is read once."""
        newest: dict[int, str] = {}
        for info in self._store.list(keys.contributions(round)):
            parsed = keys.parse_contribution_record(info.key)
            if parsed is None or info.key in self._refused_keys:
                continue
            if info.key not in self._records:
                try:
                    record = ContributionRecord.from_bytes(self._store.get(info.key))
                    if (record.replica, record.incarnation) != parsed[1:]:
                        raise BadRecord(f"expected the record of {parsed[1:]}, found another's")
                except (BadRecord, MissingKey) as error:
                    log.warning("round %d: %s is refused: %s", round, info.key, error)
                    self._refused_keys.add(info.key)
                    continue
                self._records[info.key] = record
            newest[parsed[1]] = info.key  # sorted by incarnation: the last one is the highest
        return {replica: self._records[key] for replica, key in newest.items()}

    def _reduced_shards(self, round: int) -> dict[int, tuple[str, ...]]:
        found: dict[int, tuple[str, ...]] = {}
        for info in self._store.list(keys.reduced(round)):
            parsed = keys.parse_reduced_shard(info.key)
            if parsed is not None:
                found[parsed[1]] = (*found.get(parsed[1], ()), parsed[2])
        return found

    # -- pace ------------------------------------------------------------------------------------

    def _patience_s(self) -> float:
        """How long to wait before doing the planner's work: none for the lowest live replica."""
        live = sorted(self._observer.live() | {self._identity.replica})
        return STAGGER_S * 2 * live.index(self._identity.replica)

    def _longest_poll_s(self) -> float:
        """Steered by how long exchanges take: a wait of minutes is not asked ten times a second."""
        return min(LONGEST_POLL_S, max(2 * FIRST_POLL_S, self._usual_s / POLLS_PER_WAIT))

    def _remember(self, seconds: float) -> None:
        self._usual_s = MEMORY * self._usual_s + (1 - MEMORY) * seconds if self._usual_s else seconds
