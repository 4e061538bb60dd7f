"""The I/O of one round: contribute, settle, replay.

Contribute uploads the payload, then the record that names it (I2). Settle polls: a follower GETs
the one key it waits for; only the replica whose turn it is lists contributions and leases. What to
do next is always asked of :func:`diloco.rendezvous.rounds.decide`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from diloco.codec import get_codec
from diloco.errors import RoundTimeout
from diloco.membership import Observer
from diloco.outer import l2_norm
from diloco.reduce import CannotReduce, Merged, gather
from diloco.rendezvous import keys
from diloco.rendezvous.clock import Clock
from diloco.rendezvous.records import BadRecord, Commit, ContributionRecord, Identity, Plan
from diloco.rendezvous.rounds import (
    GATHER,
    MakeCommit,
    MakePlan,
    Memory,
    Merge,
    Reduce,
    RoundView,
    Totals,
    Wait,
    decide,
)
from diloco.rendezvous.settings import GroupSettings
from diloco.rendezvous.store import MissingKey, Store
from diloco.wire import PayloadInfo, pack

log = logging.getLogger(__name__)

STAGGER_S = 1.0
"""Pause between the turns of two candidates for a plan or a commit."""
FIRST_POLL_S = 0.03
LONGEST_POLL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Base:
    """What a pseudo-gradient was taken from: the newest committed round and its weights' digest."""

    round: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """What a replica did since its base; ``loss`` is the mean over its steps."""

    tokens: int
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
    """A contribution that is durable, with its payload kept for this replica's own reduction."""

    record: ContributionRecord
    payload: bytearray


@dataclass(frozen=True, kw_only=True)
class Settled:
    """How a round ended. ``merged`` is None for a void round; ``refusal`` says why the planner did
    not let this replica's contribution in, if it said so."""

    commit: Commit
    merged: Merged | None
    refusal: str = ""


class Exchange:
    """One replica's side of every round.

    ``check`` is called while waiting and raises to leave (stop, fence). ``on_wait`` is told, for
    people, what is being waited for.
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
        numel: int,
        check: Callable[[], None],
        on_wait: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._store = store
        self._identity = identity
        self._settings = settings
        self._clock = clock
        self._observer = observer
        self._model_hash = model_hash
        self._numel = numel
        self._check = check
        self._on_wait = on_wait
        self._codec = get_codec(settings.codec)
        self._records: dict[str, ContributionRecord] = {}
        self._refused_keys: set[str] = set()

    # -- contribute ------------------------------------------------------------------------------

    def contribute(
        self, round: int, *, base: Base, gradient: Tensor, work: LocalWork, timings: Timings
    ) -> Sent:
        """Encode and upload ``gradient`` (numel,) fp32, then its record."""
        started_s = self._clock.monotonic()
        body = self._codec.encode(gradient)
        info = PayloadInfo(
            round=round,
            fragment=0,
            replica=self._identity.replica,
            incarnation=self._identity.incarnation,
            codec=self._codec.name,
            numel=self._numel,
        )
        payload = pack(info, body)
        norm = l2_norm(self._codec.decode(body))
        encode_s = self._clock.monotonic() - started_s
        timings.add("encode", encode_s)
        record = ContributionRecord(
            round=round,
            fragment=0,
            base_round=base.round,
            base_digest=base.digest,
            replica=self._identity.replica,
            incarnation=self._identity.incarnation,
            model_hash=self._model_hash,
            codec=self._codec.name,
            numel=self._numel,
            tokens=work.tokens,
            steps=work.steps,
            loss=work.loss,
            norm=norm,
            size_bytes=len(payload.data),
            digest=payload.digest,
            compute_s=work.compute_s,
            encode_s=encode_s,
            wall_s=self._clock.wall(),
        )
        where = (round, self._identity.replica, self._identity.incarnation)

        def upload() -> None:
            self._store.put(keys.contribution_payload(*where), payload.data)
            self._store.put(keys.contribution_record(*where), record.to_bytes())

        timings.time("upload", upload)
        return Sent(record=record, payload=payload.data)

    # -- settle ----------------------------------------------------------------------------------

    def commit_of(self, round: int) -> Commit | None:
        """The commit of a round, None if there is none yet."""
        try:
            return Commit.from_bytes(self._store.get(keys.commit(round)))
        except MissingKey:
            return None

    def settle(
        self, round: int, *, base: Base, totals: Totals, sent: Sent, timings: Timings
    ) -> Settled:
        """Wait for the round's commit, doing whatever it needs when nobody else does.

        Raises :class:`RoundTimeout` after ``round_timeout_s``, and whatever ``check`` raises.
        """
        started_s = self._clock.monotonic()
        deadline_s = started_s + self._settings.round_timeout_s
        memory = Memory()
        plan: Plan | None = None
        merged: Merged | None = None
        merge: Merge | None = None
        poll_s = FIRST_POLL_S
        # Followers list only when the replica whose turn it is does not seem to act.
        list_from_s = started_s + self._patience_s()
        while True:
            self._check()
            commit = self.commit_of(round) if plan is not None else None
            if commit is None and plan is None:
                plan = self._plan_of(round)
            if commit is not None:
                return self._settled(commit, plan, merged, sent, timings)
            action: object = Wait(0.0, "the plan")
            if plan is not None or self._clock.monotonic() >= list_from_s:
                view = self._view(round, base, totals, plan, merge)
                action, memory = decide(
                    view,
                    memory,
                    now_s=self._clock.monotonic(),
                    wall_s=self._clock.wall(),
                    stagger_s=STAGGER_S,
                )
            if isinstance(action, MakePlan):
                self._store.create(keys.plan(round), action.plan.to_bytes())
                for refused in action.plan.refused:
                    log.warning(
                        "round %d: replica %d is refused: %s",
                        round,
                        refused.replica,
                        refused.reason,
                    )
                continue
            if isinstance(action, Reduce):
                assert plan is not None
                merged, merge = self._reduce(plan, sent, timings)
                poll_s = FIRST_POLL_S
                continue
            if isinstance(action, MakeCommit):
                self._store.create(keys.commit(round), action.commit.to_bytes())
                continue
            assert isinstance(action, Wait)
            self._on_wait(action.why)
            now_s = self._clock.monotonic()
            if now_s > deadline_s:
                raise RoundTimeout(
                    f"round {round}: expected a commit within "
                    f"{self._settings.round_timeout_s:g} s, found none ({action.why})"
                )
            timings.time("wait", lambda: self._clock.sleep(poll_s))  # noqa: B023
            poll_s = min(LONGEST_POLL_S, poll_s * 1.4)

    def replay(self, commit: Commit) -> Merged | None:
        """The merged mean of a round that was committed without this replica; None if void.

        Raises :class:`CannotReduce` if its payloads have been swept.
        """
        if commit.void:
            return None
        plan = Plan.from_bytes(self._store.get(keys.plan(commit.round)))
        merged = self._gather(plan, None, Timings(self._clock))
        self._compare(commit, merged)
        return merged

    def _patience_s(self) -> float:
        """How long to wait before doing the planner's work: none for the lowest live replica."""
        live = sorted(self._observer.live() | {self._identity.replica})
        return STAGGER_S * 2 * live.index(self._identity.replica)

    def _plan_of(self, round: int) -> Plan | None:
        try:
            plan = Plan.from_bytes(self._store.get(keys.plan(round)))
        except MissingKey:
            return None
        if plan.mode != GATHER:
            raise BadRecord(f"round {round}: expected plan mode {GATHER!r}, found {plan.mode!r}")
        return plan

    def _view(
        self, round: int, base: Base, totals: Totals, plan: Plan | None, merge: Merge | None
    ) -> RoundView:
        contributions = {} if plan else self._contributions(round)
        expected: frozenset[int] = frozenset()
        if plan is None:
            self._observer.look(skip=frozenset(contributions))
            expected = self._observer.working_towards(round)
        return RoundView(
            round=round,
            fragment=0,
            me=self._identity,
            settings=self._settings,
            model_hash=self._model_hash,
            numel=self._numel,
            base_round=base.round,
            base_digest=base.digest,
            totals=totals,
            contributions=contributions,
            expected=expected,
            plan=plan,
            merge=merge,
        )

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

    def forget_before(self, round: int) -> None:
        """Drop records of earlier rounds from memory."""
        self._records = {k: r for k, r in self._records.items() if r.round >= round}

    def _reduce(self, plan: Plan, sent: Sent, timings: Timings) -> tuple[Merged | None, Merge]:
        try:
            merged = self._gather(plan, sent, timings)
        except CannotReduce as error:
            log.error("round %d cannot be reduced: %s", plan.round, error)
            return None, Merge(failure=str(error), failed_replica=error.replica)
        return merged, Merge(digest=merged.digest)

    def _gather(self, plan: Plan, sent: Sent | None, timings: Timings) -> Merged:
        downloading_s = 0.0

        def timed(get: Callable[[], bytes]) -> bytes:
            nonlocal downloading_s
            start = self._clock.monotonic()
            data = get()
            downloading_s += self._clock.monotonic() - start
            return data

        start = self._clock.monotonic()
        merged = gather(
            self._store,
            plan,
            codec_name=self._codec.name,
            numel=self._numel,
            own=(sent.record.digest, sent.payload) if sent else None,
            on_download=timed,
        )
        timings.add("download", downloading_s)
        timings.add("reduce", self._clock.monotonic() - start - downloading_s)
        return merged

    def _settled(
        self,
        commit: Commit,
        plan: Plan | None,
        merged: Merged | None,
        sent: Sent,
        timings: Timings,
    ) -> Settled:
        assert plan is not None, "a commit follows a plan"
        refusal = next((r.reason for r in plan.refused if r.replica == self._identity.replica), "")
        if commit.void:
            return Settled(commit=commit, merged=None, refusal=refusal)
        if merged is None:
            merged = self._gather(plan, sent, timings)
        self._compare(commit, merged)
        return Settled(commit=commit, merged=merged, refusal=refusal)

    def _compare(self, commit: Commit, merged: Merged) -> None:
        if merged.digest != commit.merged_digest:
            log.error(
                "round %d: expected merged digest %s as committed by replica %d, found %s",
                commit.round, commit.merged_digest, commit.committer.replica, merged.digest,
            )  # fmt: skip
