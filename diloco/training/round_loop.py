"""The round loop: join, exchange, apply, again. What a member does between inner steps.

Every method that can end the run returns the reason (completed, token_limit, or the final
manifest's own), or '' to go on. Waiting is left by an exception from ``check``
(:class:`~diloco.errors.Leaving`, :class:`~diloco.errors.FencedOut`).

Two positions are kept apart: :attr:`RoundLoop.round` is the round whose steps are being made,
``state.round`` the next one of the log to be applied. The rounds between them are open.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from diloco.clock import Clock
from diloco.errors import Leaving, ReplicaError, RunOver
from diloco.exchange.inflight_rounds import Exchanged, OpenRound, OpenRounds, TooLate
from diloco.exchange.reduce import CannotReduce
from diloco.exchange.round_exchange import (
    DAMAGE_PATIENCE_S,
    ContributionLost,
    Exchange,
    Settled,
    Timings,
)
from diloco.exchange.round_observer import Sight
from diloco.membership.lease import Lease, Observer
from diloco.membership.start_barrier import wait_for_everybody
from diloco.model.flat_parameters import Layout
from diloco.model.inner_state import Inner
from diloco.protocol.reading import Damaged
from diloco.protocol.records import Commit
from diloco.protocol.settings import GroupSettings
from diloco.store.base import MeteredStore, Store
from diloco.telemetry.writer import Reporter
from diloco.training.checkpoint import read_final
from diloco.training.dynamic_steps import Pace
from diloco.training.initial_state import (
    TRY_AGAIN_S,
    WAIT_S,
    first_state,
    newest_state,
    write_first,
)
from diloco.training.local_progress import Ledger
from diloco.training.post_round import Chores
from diloco.training.rescue import Rescue
from diloco.training.resume import Handover

log = logging.getLogger(__name__)

DAMAGE_POLL_S = 1.0
"""Pause between two reads of a damaged record."""


class RoundLoop:
    """One member's rounds. Owns the global state, the books of local work and the exchange.

    :mod:`diloco.training.drain` leads it through its last ones when it was asked to leave.
    """

    def __init__(
        self,
        store: Store,
        metered: MeteredStore,
        settings: GroupSettings,
        *,
        layout: Layout,
        inner: Inner,
        evaluate: Callable[[], tuple[float, int]] | None,
        lease: Lease,
        reporter: Reporter,
        clock: Clock,
        check: Callable[[], None],
    ) -> None:
        self.identity = lease.identity
        self.settings = settings
        self.round = 1
        self.ledger = Ledger(self.identity, settings, layout, clock)
        self.state, self.work = self.ledger.state, self.ledger.work
        self._store = store
        self._inner = inner
        self._lease = lease
        self._reporter = reporter
        self._clock = clock
        self._leave_check = check
        self.observer = Observer(store, clock=clock, timeout_s=settings.heartbeat_timeout_s)
        self._sight = Sight(
            store,
            self.identity,
            settings,
            observer=self.observer,
            model_hash=layout.model_hash,
            table=layout.table,
            committer=self._committer,
        )
        self._exchange = Exchange(
            store,
            self.identity,
            settings,
            clock=clock,
            sight=self._sight,
            check=self._check,
            place=self._place,
            on_wait=lambda why: lease.update(message=why),
        )
        self.chores = Chores(
            store, metered, self.state, inner, lease, reporter, evaluate, settings, clock,
            may_create=self.may_create,
        )  # fmt: skip
        self._rescue = Rescue(
            store, self.state, self.observer, self.chores, clock,
            replica=self.identity.replica, may_create=self.may_create,
        )  # fmt: skip
        self.handover = Handover(store, self.ledger, inner, self.chores, self._sight)
        shortest = 1 if settings.dylu == "on" else settings.round_steps
        at_once = min(settings.num_fragments, settings.overlap_steps // shortest + 1)
        self.open_rounds = OpenRounds(self._exchange_round, at_once=at_once)
        self._pace = Pace()
        self._round_steps = settings.round_steps
        self._over = False
        self._wrote_first = False
        self._mend_first_s = 0.0

    @property
    def data_step(self) -> int:
        """A step number that never repeats while rounds go on, for drawing data."""
        return (self.round - 1) * self.settings.round_steps + self.work.steps_in_round

    @property
    def schedule_step(self) -> int:
        """Inner steps of the *run* so far. A round that is on its way counts as committed, or the
        schedule would jump back whenever the next one begins."""
        rounds = self.state.totals.committed + len(self.open_rounds)
        return min(
            self.settings.total_steps, rounds * self.settings.round_steps + self.work.steps_in_round
        )

    # -- joining ---------------------------------------------------------------------------------

    def start(self) -> str:
        """Take the group's state and begin the first round, unless the run is over."""
        self.say("syncing")
        layout = self.state.layout
        log.info("model %s, %d parameters", layout.model_hash, layout.numel)
        self._wrote_first = first_state(
            self._store, self.identity, layout, self.state.outer, self._clock, self._check,
            may_create=self.may_create,
        )  # fmt: skip
        self._reload(at_least=0)
        self._wrote_first = False
        self.catch_up(None)
        commit, final = self.state.last_commit, read_final(self._store)
        if final is not None:
            return final.reason
        if commit is not None and commit.last:
            return self.after(commit)
        self.ledger.rounds_here = 0
        self.ledger.joined = True
        self.handover.take_up()
        start_s = self._clock.monotonic()
        if reason := self._await_handed_in():
            return reason
        if commit is None:
            self.say("waiting")
            wait_for_everybody(
                self._store, self.settings, lease=self._lease, observer=self.observer,
                clock=self._clock, check=self._check,
            )  # fmt: skip
        self.chores.before_first["wait"] = self._clock.monotonic() - start_s
        self._begin_round(self.state.round, made=self.handover.steps_made)
        return ""

    def _await_handed_in(self) -> str:
        """Stand where the earlier process stood: after steps that it has handed in, waiting for
        the round's commit."""
        while self.handover.steps_made >= self.settings.round_steps:
            round = self.round = self.state.round
            self.say("waiting")
            base = self.state.bases[self._sight.fragment(round)]
            try:
                self._exchange.settle(
                    round, base=base, sent=None, timings=Timings(self._clock),
                    earlier=self.ledger.earlier_contribution(round),
                )  # fmt: skip
            except ContributionLost as lost:
                log.error("%s; its steps are made again", lost)
                self.ledger.replace_earlier(round)
                continue
            self.catch_up(None)
            commit = self.state.last_commit
            if commit is not None and commit.last:
                return self.after(commit)
        return ""

    def _reload(self, *, at_least: int, why: str = "") -> None:
        """Take the newest checkpoint, of round ``at_least`` or later; local work is dropped.

        While there is none, the lease shows the round, and other replicas write one.
        """
        state = self.state

        def ask() -> None:
            self._lease.update(
                state="syncing", blocked=at_least, message=why or "waiting for a checkpoint"
            )
            self.observer.look()
            self._rescue.look()
            self._mend_first()

        try:
            restored = newest_state(
                self._store, state.layout, state.outer, at_least, self._clock, self._check,
                why=why, on_missing=ask,
            )  # fmt: skip
            commit = self._commit_after(restored.round)
        finally:
            self._lease.update(blocked=None)
        state.load(restored, commit)
        self.ledger.throw_away()
        self.open_rounds.thrown_away()
        self.open_rounds.drop_before(state.round)

    def _mend_first(self) -> None:
        """Before it has loaded checkpoint 0, the process that wrote it still has the weights."""
        if not self._wrote_first or self._clock.monotonic() < self._mend_first_s:
            return
        log.error("checkpoint 0 cannot be read; it is written again")
        self._mend_first_s = self._clock.monotonic() + TRY_AGAIN_S
        state = self.state
        write_first(
            self._store, self.identity, state.layout, state.outer, self._clock, replace=True
        )

    def _commit_after(self, round: int) -> Commit | None:
        """The commit of a checkpoint's round, which other replicas write again if it is damaged."""
        if not round:
            return None
        give_up_s = self._clock.monotonic() + WAIT_S
        while True:
            try:
                return self._sight.commit_of(round)
            except Damaged as error:
                if self._clock.monotonic() > give_up_s:
                    raise ReplicaError(
                        f"{error}. Restore it from a backup, or fork the run from a checkpoint"
                    ) from None
                self._lease.update(blocked=round, message=str(error))
            self._check()
            self._clock.sleep(DAMAGE_POLL_S)

    def _commit_to_apply(self, round: int) -> Commit | None:
        """The commit of the next round, if there is one. Raises :class:`CannotReduce` for one that
        is damaged for good."""
        give_up_s = self._clock.monotonic() + DAMAGE_PATIENCE_S
        while True:
            try:
                return self._sight.commit_of(round)
            except Damaged as error:
                if self._clock.monotonic() > give_up_s:
                    raise CannotReduce(None, str(error)) from None
            self._check()
            self._clock.sleep(DAMAGE_POLL_S)

    def catch_up(self, missed: OpenRound | None) -> None:
        """Apply every commit there is, up to the next open round. ``missed`` is the round that
        turned out to be committed without this replica, or unreadable for it."""
        state = self.state
        while not self.open_rounds.has(state.round):
            try:
                commit = self._commit_to_apply(state.round)
                if commit is None:
                    break
                merged = self._exchange.replay(commit)
            except CannotReduce as error:
                log.warning("round %d cannot be replayed: %s", state.round, error)
                self._reload(
                    at_least=state.round, why=f"round {state.round} cannot be read: {error}"
                )
                continue
            ours = missed if missed and missed.round == commit.round else None
            is_fresh = self.ledger.in_quarantine(commit.round)
            outcome = self.ledger.apply(commit, merged, ours, policy=self.settings.late_policy)
            if is_fresh and outcome == "late":
                self._overwrite()
            if commit.last:
                break
        if self.round < state.round:
            self._begin_round(state.round)

    # -- rounds ----------------------------------------------------------------------------------

    def _begin_round(self, round: int, *, made: int = 0) -> None:
        self.round = round
        if self.settings.dylu == "on":
            self._round_steps = self._pace.steps(self.identity.replica, self.settings.round_steps)
        self.work.begin_round(made=made)
        self._sight.forget_before(self.state.round)
        self.say("computing")

    def step_made(self) -> str:
        """After an inner step: close the rounds whose time has come, and end this one if it is."""
        while self.open_rounds.due(self.work.now.steps) or self._must_close():
            if reason := self.close_round():
                return reason
        if self.work.steps_in_round < self._round_steps:
            return ""
        return self._end_round()

    def _must_close(self) -> bool:
        """Whether this round is over while its fragment's last one is still on its way (rounds that
        dynamic local updates have shortened): that one's weights are this one's base."""
        over = self.work.steps_in_round >= self._round_steps
        return over and self.open_rounds.has_fragment(self._sight.fragment(self.round))

    def _end_round(self) -> str:
        """Send off what was done for the round; then wait for it, or begin the next."""
        opened = self.ledger.open(self.round, self._sight.fragment(self.round))
        if opened is None:
            return self._discard_local()
        overlapping = self.settings.overlap_steps > 0
        if not overlapping:
            self.say("uploading")
        self.open_rounds.begin(opened)
        if not overlapping:
            return self.close_round()
        self._begin_round(self.round + 1)
        return ""

    def _exchange_round(self, opened: OpenRound) -> Exchanged:
        """One round's I/O; runs in a thread of its own."""
        if opened.sent is None:
            if self._is_decided(opened.round):
                return TooLate()
            if self.ledger.earlier_contribution(opened.round) is None:
                self.contribute(opened)
            self._lease.update(round=self._promised_round())
        if self.settings.overlap_steps == 0:
            self.say("waiting")
        settled = self._settle(opened)
        return TooLate() if opened.sent is None else settled

    def _settle(self, opened: OpenRound) -> Settled:
        """Settle a round with this process' contribution or with that of an earlier one."""
        while True:
            earlier = None if opened.sent else self.ledger.earlier_contribution(opened.round)
            try:
                return self._exchange.settle(
                    opened.round, base=opened.base, sent=opened.sent, timings=opened.timings,
                    earlier=earlier,
                )  # fmt: skip
            except ContributionLost as lost:
                log.error("%s; this process contributes in its place", lost)
                self.ledger.replace_earlier(opened.round)
                self.contribute(opened)

    def _is_decided(self, round: int) -> bool:
        try:
            return self._sight.commit_of(round) is not None
        except Damaged:
            return True

    def contribute(self, opened: OpenRound) -> None:
        self._check()
        opened.sent = self._exchange.contribute(
            opened.round,
            base=opened.base,
            model_hash=self.state.layout.model_hash,
            vector=opened.contributed,
            work=opened.work,
            rounds_here=self.ledger.rounds_here,
            timings=opened.timings,
        )

    def close_round(self) -> str:
        """Wait for the oldest open round and apply it; then chores, or the end."""
        opened = self.open_rounds.first()
        overlapping = self.settings.overlap_steps > 0
        if overlapping:
            self.say("waiting")
        start_s = self._clock.monotonic()
        failure: CannotReduce | None = None
        exchanged: Exchanged = TooLate()
        try:
            exchanged = self.open_rounds.close(self._check, meanwhile=self._rescue.look)
        except RunOver as over:
            log.info("round %d will not be: %s", opened.round, over)
        except CannotReduce as error:
            log.error("round %d is committed but cannot be read here: %s", opened.round, error)
            failure = error
        blocked_s = self._clock.monotonic() - start_s
        self.say("applying")
        start_s = self._clock.monotonic()
        if isinstance(exchanged, Settled):
            outcome = self._take(opened, exchanged)
        else:
            if self.ledger.earlier_contribution(opened.round):
                log.info("an earlier process had contributed to round %d", opened.round)
            elif failure is None:
                log.warning("round %d was committed without this replica: late", opened.round)
            self.catch_up(opened)
            outcome = "late"
        apply_s = self._clock.monotonic() - start_s
        commit = self._commit_for_report(opened.round)
        assert commit is not None, "an exchange ends with a commit"
        report = self.chores.report(
            commit, outcome, opened, blocked_s=blocked_s, apply_s=apply_s, overlapping=overlapping
        )
        try:
            if isinstance(exchanged, Settled) and exchanged.refusal:
                self._refused(exchanged.refusal.kind, exchanged.refusal.reason)
            assert self.state.last_commit is not None
            return self.after(self.state.last_commit)
        finally:
            self.chores.send(report)

    def _commit_for_report(self, round: int) -> Commit | None:
        try:
            return self._sight.commit_of(round) or self.state.last_commit
        except Damaged:
            return self.state.last_commit

    def _take(self, opened: OpenRound, settled: Settled) -> str:
        """Apply a round that was settled; what became of this replica's work in it."""
        if settled.plan is not None:
            self._pace.learn(settled.plan)
        opened.cosine = settled.cosine
        policy = self.settings.late_policy
        kind = settled.refusal.kind if settled.refusal else ""
        if kind == "spare":
            policy = "overwrite"  # a spare follows
        outcome = self.ledger.apply(settled.commit, settled.merged, opened, policy=policy)
        if kind == "quarantine":
            self._overwrite()
        return outcome

    def _overwrite(self) -> None:
        self.ledger.overwrite()
        self.open_rounds.thrown_away()

    def _refused(self, kind: str, reason: str) -> None:
        """Something is wrong with what this replica stands on: start from what everybody has."""
        if kind != "refused":
            log.warning("this replica's contribution did not count (%s): %s", kind, reason)
            return
        log.error("this replica's contribution was refused: %s", reason)
        self._reload(at_least=0)
        self.catch_up(None)

    def _discard_local(self) -> str:
        """Non-finite local weights: nothing of them may reach the group."""
        self.ledger.discard(self.round)
        self._inner.reset()
        self.open_rounds.thrown_away()
        self.catch_up(None)
        self._begin_round(self.round)
        self._lease.update(round=self.round + 1)  # nobody need wait for this replica
        commit = self.state.last_commit
        return self.after(commit) if commit and commit.last else ""

    def after(self, commit: Commit) -> str:
        """What whoever's turn it is does beside training; then the next round or the end."""
        self.chores.after(commit, self.ledger.residuals)
        if not commit.last:
            self._rescue.look()
        if commit.last:
            full = commit.committed_total >= self.settings.total_rounds
            return "completed" if full else "token_limit"
        if self.round < self.state.round:
            self._begin_round(self.state.round)
        else:
            self.work.resume()
            self.say("computing")
        return ""

    # -- ending ----------------------------------------------------------------------------------

    def save(self) -> None:
        """Save what is this replica's own, and what it has handed in, for a relaunch."""
        self.handover.save(self.close(), round=self.round, data_step=self.data_step)
        self._rescue.mend_commits(self._sight.known_commits())

    def close(self) -> list[OpenRound]:
        """End the exchanges that are on their way; those whose contribution is durable."""
        self._over = True
        return self.open_rounds.end()

    # -- small things ----------------------------------------------------------------------------

    def say(self, state: str) -> None:
        self._lease.update(
            state=state, round=self._promised_round(), step=self.data_step, message=""
        )
        self._reporter.phase(state=state, round=self.round)

    def may_create(self) -> bool:
        """Whether this replica may create: anybody, but for stores without an atomic create."""
        return self._committer() in (None, self.identity.replica)

    def _committer(self) -> int | None:
        return None if self._store.atomic_create else self._lease.committer

    def _promised_round(self) -> int:
        """The oldest round that others may wait for this replica in: one whose contribution is
        still on its way, or the one it is working for."""
        return self.open_rounds.unsent() or self.round

    def _check(self) -> None:
        if self._over:
            raise Leaving("over")
        self._leave_check()

    def _place(self) -> int:
        """Among the live replicas, for turns."""
        live = sorted(self.observer.live() | {self.identity.replica})
        return live.index(self.identity.replica)
