"""The I/O of one round: contribute, settle, replay.

Contribute uploads the payload, then the record that names it (I2). Settle polls: a follower GETs
the one key it waits for; only the replica whose turn it is lists contributions, leases and reduced
shards. What to do next is always asked of :func:`diloco.protocol.round_decision.decide`.

Several rounds may be settled at once, each in a thread of its own (overlap).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from diloco.clock import Clock
from diloco.codecs import get_codec
from diloco.errors import RoundTimeout
from diloco.exchange.cosine import cosine_to_mean
from diloco.exchange.payload import Packing, PayloadInfo
from diloco.exchange.reduce import CannotReduce, Merged, Meter, Own, Reducer, new_fragment
from diloco.exchange.round_observer import Base, Sight
from diloco.exchange.step_accounting import LocalWork
from diloco.exchange.upload import bytes_to_verify, upload
from diloco.protocol import keys
from diloco.protocol.reading import Damaged
from diloco.protocol.records import Commit, ContributionRecord, Identity, Plan, Refusal
from diloco.protocol.round_decision import decide, void_unplanned
from diloco.protocol.round_view import (
    FAR,
    GATHER,
    WHOLE,
    Look,
    MakeCommit,
    MakePlan,
    Memory,
    Merge,
    Reduce,
    Wait,
)
from diloco.protocol.settings import GroupSettings
from diloco.store.base import Store

log = logging.getLogger(__name__)

STAGGER_S = 1.0
"""Pause between the turns of two candidates for a plan or a commit."""
DAMAGE_PATIENCE_S = 10.0
"""How long a damaged plan or commit of a decided round is read again before it is given up."""
FIRST_POLL_S = 0.03
LONGEST_POLL_S = 1.0
POLLS_PER_WAIT = 8
"""How often a follower looks while it waits as long as it usually does."""
MEMORY = 0.7
"""Weight of the past in the running mean of how long exchanges take."""


class ContributionLost(Exception):
    """The record of a contribution that an earlier process made cannot be read, and no plan names
    it yet."""


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

    def reduced(self, meter: Meter) -> None:
        self.add("download", meter.download_s)
        self.add("upload", meter.upload_s)
        self.add("reduce", meter.total_s - meter.download_s)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A contribution that is durable, with the vector that was encoded, for this replica's own
    part of the reduction."""

    record: ContributionRecord
    own: Own
    damage: str = ""
    """What is wrong with the stored payload, which no upload could mend."""


@dataclass(frozen=True, kw_only=True)
class Settled:
    """How a round ended. ``plan`` is None for a void round whose plan cannot be read. ``merged`` is
    None for a void round, and for a process that contributed nothing. ``refusal`` says why this
    replica's contribution is not in the plan. ``cosine`` is that of what it contributed to the
    merged mean (:mod:`diloco.exchange.cosine`), if it is in there."""

    commit: Commit
    plan: Plan | None
    merged: Merged | None
    refusal: Refusal | None = None
    cosine: float | None = None


@dataclass
class _Course:
    """Where one settling stands; ``vector`` has the shards of ``merges`` in their places."""

    sent: Sent | None
    timings: Timings
    round: int
    earlier: Identity | None = None
    """An earlier process that contributed in place of ``sent``."""
    damaged_s: float | None = None
    """When plan or commit was first found damaged."""
    memory: Memory = field(default_factory=Memory)
    plan: Plan | None = None
    merges: dict[int, Merge] = field(default_factory=dict)
    vector: Tensor | None = None
    merged: Merged | None = None
    reduced: dict[int, tuple[str, ...]] | None = None

    @property
    def own(self) -> Own | None:
        return self.sent.own if self.sent else None


class Exchange:
    """One process's side of every round.

    ``check`` is called while waiting and raises to leave (stop, fence). ``on_wait`` is told, for
    people, what is being waited for. ``place`` is this process's place among those that would look
    whether a round can be planned: the first does so at once, the others later.
    """

    def __init__(
        self,
        store: Store,
        identity: Identity,
        settings: GroupSettings,
        *,
        clock: Clock,
        sight: Sight,
        check: Callable[[], None],
        place: Callable[[], int],
        on_wait: Callable[[str], None] = lambda why: None,
    ) -> None:
        self.sight = sight
        self._store = store
        self._identity = identity
        self._settings = settings
        self._clock = clock
        self._check = check
        self._place = place
        self._on_wait = on_wait
        self._codec = get_codec(settings.codec, topk=settings.topk)
        self._reducer = Reducer(store, settings, clock)
        self._verify_bytes = bytes_to_verify()
        self._usual_s = 0.0

    # -- contribute ------------------------------------------------------------------------------

    def contribute(
        self,
        round: int,
        *,
        base: Base,
        model_hash: str,
        vector: Tensor,
        work: LocalWork,
        rounds_here: int,
        timings: Timings,
    ) -> Sent:
        """Upload ``vector`` (n,) fp32, the fragment's pseudo-gradient, while it is being encoded,
        then its record."""
        info = PayloadInfo(
            round=round,
            fragment=self.sight.fragment(round),
            replica=self._identity.replica,
            incarnation=self._identity.incarnation,
            codec=self._codec.name,
            numel=vector.numel(),
        )
        where = (round, self._identity.replica, self._identity.incarnation)
        started_s = self._clock.monotonic()
        packing, damage = upload(
            self._store,
            keys.contribution_payload(*where),
            lambda: Packing(info, vector, self._codec, self.sight.slots(round), clock=self._clock),
            self._codec,
            verify_bytes=self._verify_bytes,
        )
        timings.add("upload", self._clock.monotonic() - started_s)
        timings.add("upload", -packing.encode_s)
        timings.add("encode", packing.encode_s)
        record = ContributionRecord(
            round=info.round,
            fragment=info.fragment,
            base_round=base.round,
            base_digest=base.digest,
            replica=info.replica,
            incarnation=info.incarnation,
            model_hash=model_hash,
            codec=info.codec,
            numel=info.numel,
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
            encode_s=packing.encode_s,
            rounds_here=rounds_here,
            wall_s=self._clock.wall(),
        )
        data = record.to_bytes()
        timings.time("upload", lambda: self._store.put(keys.contribution_record(*where), data))
        own = Own(identity=self._identity, digest=packing.digest, vector=vector, body=packing.body)
        if damage:
            log.error("round %d: this replica's payload cannot be stored whole: %s", round, damage)
        return Sent(record=record, own=own, damage=damage)

    def replay(self, commit: Commit) -> Merged | None:
        """The merged mean of a round that was committed without this replica; None if void.

        Raises :class:`CannotReduce` if its payloads have been swept.
        """
        if commit.void:
            return None
        try:
            plan = self.sight.plan_of(commit.round)
        except Damaged as error:
            raise CannotReduce(None, str(error)) from None
        if plan is None:
            raise CannotReduce(None, f"{keys.plan(commit.round)} is missing")
        return self._committed(plan, commit, _Course(None, Timings(self._clock), commit.round))

    # -- settle ----------------------------------------------------------------------------------

    def settle(
        self,
        round: int,
        *,
        base: Base,
        sent: Sent | None,
        timings: Timings,
        earlier: Identity | None = None,
    ) -> Settled:
        """Wait for the round's commit, and do what it needs when no other replica does.

        ``earlier`` is the process of this replica that contributed, if this one did not. Raises
        :class:`ContributionLost` if its record cannot be read while there is no plan,
        :class:`RoundTimeout` after ``round_timeout_s`` (time below quorum left out, as far
        as this process has looked), :class:`~diloco.errors.RunOver` when an earlier round turns out
        to be the last, :class:`CannotReduce` where a committed round cannot be read here, and
        whatever ``check`` raises.
        """
        started_s = self._clock.monotonic()
        # Followers list only when the replica whose turn it is does not seem to act.
        list_from_s = started_s + STAGGER_S * 2 * self._place()
        waiting_since_s = started_s
        course = _Course(sent, timings, round, earlier)
        poll_s = FIRST_POLL_S
        while True:
            self._check()
            commit, damaged = self._look_for_commit(round, course)
            now_s = self._clock.monotonic()
            if commit is not None and (course.plan is not None or commit.void):
                self._remember(now_s - started_s)
                return self._settled(commit, course)
            action: object = Wait(0.0, "the plan")
            if damaged is not None:
                try:
                    action = self._await_readable(damaged, commit, course, now_s)
                except Damaged as error:  # the commit before: that round's exchange sees to it
                    action = Wait(FAR, str(error))
            elif course.plan is not None or now_s >= list_from_s:
                try:
                    action = self._decide(round, base, course, started_s, now_s)
                except Damaged as error:  # the commit before: that round's exchange sees to it
                    action = Wait(FAR, str(error))
            if not isinstance(action, Wait):
                self._act(action, course)
                poll_s = FIRST_POLL_S
                continue
            self._on_wait(action.why)
            if action.patient:
                waiting_since_s = now_s
            if now_s > waiting_since_s + self._settings.round_timeout_s:
                raise RoundTimeout(
                    f"round {round}: expected a commit within "
                    f"{self._settings.round_timeout_s:g} s, found none ({action.why})"
                )
            course.reduced = None
            timings.time("wait", lambda: self._clock.sleep(poll_s))  # noqa: B023
            poll_s = min(self._longest_poll_s(), poll_s * 1.4)

    def _look_for_commit(self, round: int, course: _Course) -> tuple[Commit | None, Damaged | None]:
        """The round's commit, if there is one, and what of plan and commit is damaged."""
        commit: Commit | None = None
        damaged: Damaged | None = None
        if course.plan is None:
            try:
                course.plan = self.sight.plan_of(round)
            except Damaged as error:
                damaged = error
        if course.plan is not None or damaged is not None:
            try:
                commit = self.sight.commit_of(round)
            except Damaged as error:
                damaged = error
        return commit, damaged

    def _await_readable(
        self, damaged: Damaged, commit: Commit | None, course: _Course, now_s: float
    ) -> Wait | MakeCommit:
        """Wait a while for a damaged plan or commit to be readable; then make an undecided round
        void. A replica that has read the plan may commit the round first: one create succeeds.

        Raises :class:`CannotReduce` when the round is decided and cannot be read here, and
        :class:`Damaged` for the commit of the round before.
        """
        if course.damaged_s is None:
            course.damaged_s = now_s
            log.error("%s", damaged)
        decided = commit is not None or damaged.key == keys.commit(course.round)
        if decided and now_s > course.damaged_s + DAMAGE_PATIENCE_S:
            raise CannotReduce(None, str(damaged))
        if not decided and self.sight.may_create() and now_s > course.damaged_s + self._plan_wait_s:
            totals = self.sight.totals_before(course.round)
            if totals is not None:
                return MakeCommit(
                    void_unplanned(
                        course.round, self.sight.fragment(course.round), self._identity,
                        reason=str(damaged), totals=totals, wall_s=self._clock.wall(),
                    )
                )  # fmt: skip
        return Wait(FAR, str(damaged))

    @property
    def _plan_wait_s(self) -> float:
        """How long a damaged plan is read again before its round is made void, by turns."""
        patience_s = self._settings.heartbeat_timeout_s + DAMAGE_PATIENCE_S
        return min(patience_s, self._settings.round_timeout_s / 2) + STAGGER_S * self._place()

    def _decide(
        self, round: int, base: Base, course: _Course, started_s: float, now_s: float
    ) -> object:
        if course.plan is None:
            own = course.sent.record if course.sent else None
            view = self.sight.before_plan(
                round, base, own=own, waited_s=now_s - started_s, sync_s=self._usual_s
            )
            if course.earlier and self._identity.replica not in view.contributions:
                self._require_readable(round, course.earlier)
        else:
            view = self.sight.after_plan(
                course.plan, base, merges=course.merges, reduced=course.reduced
            )
        wall_s = self._clock.wall()
        action, course.memory = decide(
            view, course.memory, now_s=now_s, wall_s=wall_s, stagger_s=STAGGER_S
        )
        return action

    def _require_readable(self, round: int, earlier: Identity) -> None:
        """A list may be stale, or one read damaged, so the record itself is read."""
        if reason := self.sight.damage_of_contribution(round, earlier):
            raise ContributionLost(f"round {round}: an earlier process contributed, but {reason}")

    def _act(self, action: object, course: _Course) -> None:
        match action:
            case MakePlan(plan):
                if self._store.create(keys.plan(plan.round), plan.to_bytes()):
                    course.plan = plan
                for out in plan.refused:
                    log.warning(
                        "round %d: replica %d is not in it (%s): %s",
                        plan.round, out.replica, out.kind, out.reason,
                    )  # fmt: skip
            case Reduce(plan, shard):
                self._reduce(plan, shard, course)
            case Look(plan):
                course.reduced = self.sight.reduced_shards(plan.round)
            case MakeCommit(commit):
                if self._store.create(keys.commit(commit.round), commit.to_bytes()):
                    self.sight.remember(commit)

    def _reduce(self, plan: Plan, shard: int, course: _Course) -> None:
        slots, meter = self.sight.slots(plan.round), self._reducer.meter()
        if (
            course.sent
            and course.sent.damage
            and any(map(course.sent.own.made, plan.contributions))
        ):
            course.merges[shard] = Merge(
                failure=f"payload of replica {self._identity.replica}: {course.sent.damage}",
                failed_replica=self._identity.replica,
            )
            return
        try:
            if plan.mode == GATHER:
                course.merged = self._reducer.gather(plan, slots, course.own, meter)
                course.merges[WHOLE] = Merge(digest=course.merged.digest)
            else:
                if course.vector is None:
                    course.vector = new_fragment(slots)
                found = self._reducer.store_shard(
                    plan, shard, slots, course.own, meter, course.vector
                )
                course.merges[shard] = Merge(digest=found)
        except CannotReduce as error:
            log.error("round %d cannot be reduced: %s", plan.round, error)
            course.merges[shard] = Merge(failure=str(error), failed_replica=error.replica)
        course.timings.reduced(meter)

    def _settled(self, commit: Commit, course: _Course) -> Settled:
        plan, merged = course.plan, course.merged
        refused = plan.refused if plan else ()
        refusal = next((r for r in refused if r.replica == self._identity.replica), None)
        if plan is None or commit.void or course.sent is None:
            return Settled(commit=commit, plan=plan, merged=None, refusal=refusal)
        if merged is None:
            merged = self._committed(plan, commit, course)
        else:
            self._compare(commit, merged)
        cosine = self._cosine(plan, merged, course)
        return Settled(commit=commit, plan=plan, merged=merged, refusal=refusal, cosine=cosine)

    def _cosine(self, plan: Plan, merged: Merged, course: _Course) -> float | None:
        """Of a round that took this process' contribution. Now, because the outer step uses the
        merged vector up; its time is told with the reduction's."""
        own = course.own
        if own is None or not any(map(own.made, plan.contributions)):
            return None
        start_s = self._clock.monotonic()
        cosine = cosine_to_mean(lambda where: own.decoded(where, self._codec), merged.vector)
        course.timings.add("reduce", self._clock.monotonic() - start_s)
        return cosine

    def _committed(self, plan: Plan, commit: Commit, course: _Course) -> Merged:
        meter = self._reducer.meter()
        merged = self._reducer.committed(
            plan, commit, self.sight.slots(commit.round), course.own, meter,
            vector=course.vector,
            done={shard: merge.digest for shard, merge in course.merges.items()},
        )  # fmt: skip
        course.timings.reduced(meter)
        self._compare(commit, merged)
        return merged

    @staticmethod
    def _compare(commit: Commit, merged: Merged) -> None:
        """The mean is a function of the payloads, so this replica goes by its own; who of the two
        is wrong shows when the digests of the weights are compared."""
        if merged.digest != commit.merged_digest:
            log.error(
                "round %d: expected merged digest %s as committed by replica %d, found %s",
                commit.round, commit.merged_digest, commit.committer.replica, merged.digest,
            )  # fmt: skip

    # -- pace ------------------------------------------------------------------------------------

    def _longest_poll_s(self) -> float:
        """Steered by how long exchanges take: a wait of minutes is not asked ten times a second."""
        return min(LONGEST_POLL_S, max(2 * FIRST_POLL_S, self._usual_s / POLLS_PER_WAIT))

    def _remember(self, seconds: float) -> None:
        past = self._usual_s or seconds
        self._usual_s = MEMORY * past + (1 - MEMORY) * seconds
