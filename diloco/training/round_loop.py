"""The round loop of a replica: join, exchange, apply. It runs between the caller's inner steps.

Methods that can end training return the :class:`~diloco.errors.StopReason`, or None to continue.
``context.check`` interrupts waits by :class:`~diloco.errors.StopTraining` or
:class:`~diloco.errors.FencedOut`.

There are two positions: :attr:`RoundLoop.round` is the round of the current inner steps,
``state.round`` the next round of the log to apply. The rounds between them are in flight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from diloco.errors import RunOver, StopReason, StopTraining
from diloco.exchange.inflight_rounds import (
    ExchangeOutcome,
    InflightRound,
    InflightRounds,
    MissedRound,
)
from diloco.exchange.reduce import CannotReduce
from diloco.exchange.round_exchange import ContributionLost, Exchange, RoundResult, Timings
from diloco.exchange.round_observer import RoundObserver
from diloco.membership.observer import Observer
from diloco.membership.start_barrier import wait_for_start
from diloco.model.inner_state import Inner
from diloco.protocol.control_pace import is_short_round
from diloco.protocol.reading import Damaged
from diloco.protocol.records import Commit
from diloco.training.catch_up import CatchUp
from diloco.training.context import ReplicaContext
from diloco.training.dynamic_steps import DynamicLocalUpdates
from diloco.training.final_result import read_final
from diloco.training.late_share import NOTHING
from diloco.training.local_progress import LocalProgress
from diloco.training.partial_round import PartialRounds
from diloco.training.post_round import Evaluate, PostRoundTasks
from diloco.training.rescue import Rescue
from diloco.training.resume import Resumption

log = logging.getLogger(__name__)


class RoundLoop:
    """The rounds of one replica. Owns its local progress, the global state and the exchange.

    :mod:`diloco.training.drain` runs the last rounds of a replica that leaves.
    """

    def __init__(
        self,
        context: ReplicaContext,
        progress: LocalProgress,
        *,
        inner: Inner,
        evaluate: Evaluate | None,
    ) -> None:
        self._group_check = context.check
        context = self._context = replace(context, check=self._check)
        settings = self.settings = context.settings
        self.identity = context.identity
        self.round = 1
        self.progress = progress
        self.state, self.counter = progress.state, progress.counter
        layout = self.state.layout
        self._inner = inner
        self._lease = context.lease
        self._clock = context.clock
        self.observer = Observer(
            context.store,
            clock=context.clock,
            timeout_s=settings.heartbeat_timeout_s,
            gaps=lambda: self._lease.gaps,
            unretried=context.metered,
        )
        self._round_observer = RoundObserver(
            context.store,
            settings,
            lease=context.lease,
            observer=self.observer,
            model_hash=layout.model_hash,
            table=layout.table,
        )
        self._exchange = Exchange(
            context.store,
            settings,
            lease=context.lease,
            round_observer=self._round_observer,
            clock=context.clock,
            check=self._check,
            team=context.team,
        )
        self.tasks = PostRoundTasks(context, self.progress, inner, evaluate)
        self._rescue = Rescue(context, self.state, self.observer, self.tasks)
        self.resumption = Resumption(
            context.store,
            self.progress,
            inner,
            self.tasks,
            self._round_observer,
            context.storage,
        )
        shortest = 1 if settings.dylu == "on" else settings.round_steps
        at_once = min(settings.num_fragments, settings.overlap_steps // shortest + 1)
        self.inflight = InflightRounds(self._exchange_round, at_once=at_once)
        self._catch_up = CatchUp(
            context,
            self.progress,
            self.inflight,
            observer=self.observer,
            round_observer=self._round_observer,
            exchange=self._exchange,
            rescue=self._rescue,
            finish_checkpoint=self.tasks.finish_checkpoint,
        )
        self._dynamic_steps = DynamicLocalUpdates()
        self._partial_rounds = PartialRounds(
            self.progress,
            self._round_observer,
            lease=context.lease,
            observer=self.observer,
            clock=context.clock,
        )
        self._round_steps = settings.round_steps
        self._closed = False

    @property
    def data_step(self) -> int:
        """The step number for drawing data; it never repeats in the life of a replica number."""
        return (self.round - 1) * self.settings.round_steps + self.counter.steps_in_round

    @property
    def schedule_step(self) -> int:
        """Inner steps of the *run* so far. Rounds in flight count as committed; otherwise the
        schedule would jump back at the start of each round."""
        rounds = self.state.totals.committed + len(self.inflight)
        steps = rounds * self.settings.round_steps + self.counter.steps_in_round
        return min(self.settings.total_steps, steps)

    # -- joining ---------------------------------------------------------------------------------

    def start(self) -> StopReason | None:
        """Load the group's state and begin the first round, unless the run has ended."""
        self.set_state("syncing")
        layout = self.state.layout
        log.info("model %s, %d parameters", layout.model_hash, layout.numel)
        self._catch_up.load_first()
        self.catch_up(None)
        commit, final = self.state.last_commit, read_final(self._context.store)
        if final is not None:
            return StopReason.of(final.reason)
        if commit is not None and commit.last:
            return self.after(commit)
        self.progress.rounds_here = 0
        self.progress.joined = True
        self.resumption.restore()
        start_s = self._clock.monotonic()
        if reason := self._await_early_contribution():
            return reason
        if commit is None:
            self.set_state("waiting")
            wait_for_start(
                self._context.store,
                self.settings,
                lease=self._lease,
                observer=self.observer,
                clock=self._clock,
                check=self._check,
            )
        elif self.state.last_commit is not None:
            others = self.state.last_commit.contributors
            self._partial_rounds.join(
                self.state.round, [one for one in others if one.replica != self.identity.replica]
            )
        self.tasks.before_first["wait"] = self._clock.monotonic() - start_s
        self._begin_round(self.state.round, made=self.resumption.steps_made)
        return None

    def _await_early_contribution(self) -> StopReason | None:
        """Wait for the commits of rounds to which the earlier process contributed all its steps."""
        while self.resumption.steps_made >= self.settings.round_steps:
            round = self.round = self.state.round
            self.set_state("waiting")
            base = self.state.bases[self._round_observer.fragment(round)]
            earlier = self.progress.earlier_contributor(round)
            timings = Timings(self._clock)
            try:
                self._exchange.settle(round, base=base, sent=None, timings=timings, earlier=earlier)
            except ContributionLost as lost:
                log.error("%s; its steps are repeated", lost)
                self.progress.replace_earlier(round)
                continue
            self.catch_up(None)
            commit = self.state.last_commit
            if commit is not None and commit.last:
                return self.after(commit)
        return None

    def catch_up(self, missed: InflightRound | None) -> None:
        """Apply all commits up to the next open round, and begin the next round if this one is
        over. For ``missed`` see :meth:`CatchUp.apply_commits`."""
        self._catch_up.apply_commits(missed)
        if self.round < self.state.round:
            self._begin_round(self.state.round)

    # -- rounds ----------------------------------------------------------------------------------

    def _begin_round(self, round: int, *, made: int = 0) -> None:
        self.round = round
        steps = self.settings.round_steps
        if self.settings.dylu == "on":
            steps = self._dynamic_steps.steps(self.identity.replica, steps)
        self._round_steps = steps
        self.counter.begin_round(made=made)
        self._round_observer.forget_before(self.state.round)
        self.set_state("computing")

    def step_made(self) -> StopReason | None:
        """After an inner step, close the rounds that are due, and this round if it is complete. If
        an earlier round has just discarded the steps of a complete one, the next step completes it:
        there is nothing to contribute without steps."""
        if self._partial_rounds.must_end(self.round, steps=self._round_steps):
            self._round_steps = self.counter.steps_in_round
        while self.inflight.due(self.counter.now.steps) or self._must_close():
            if reason := self.close_round():
                return reason
        fragment = self._round_observer.fragment(self.round)
        is_complete = self.counter.steps_in_round >= self._round_steps
        if not is_complete or not self.counter.steps_since_base(fragment):
            return None
        return self._end_round()

    def _must_close(self) -> bool:
        """Return whether this round is complete while the previous round of its fragment, whose
        result is its base, is in flight (rounds that dynamic local updates have shortened)."""
        complete = self.counter.steps_in_round >= self._round_steps
        return complete and self.inflight.has_fragment(self._round_observer.fragment(self.round))

    def _end_round(self) -> StopReason | None:
        """Start the exchange of this round; then wait for it, or begin the next round."""
        self.tasks.finish_state()
        self.tasks.hooks.before(self.round)
        self.tasks.watcher.before(self.round)
        opened = self.progress.open(self.round, self._round_observer.fragment(self.round))
        if opened is None:
            return self._discard_non_finite()
        opened.is_awaited = self._lease.can_be_awaited
        overlapping = self.settings.overlap_steps > 0
        if not overlapping:
            self.set_state("uploading")
        self.inflight.begin(opened)
        del opened  # its vectors are freed when its round is closed
        if not overlapping:
            return self.close_round()
        self._begin_round(self.round + 1)
        return None

    def _exchange_round(self, opened: InflightRound) -> ExchangeOutcome:
        """Exchange one round; runs in a background thread."""
        try:
            if opened.sent is None:
                if opened.is_awaited and self._is_decided(opened.round):
                    return MissedRound()
                if self.progress.earlier_contributor(opened.round) is None:
                    self.contribute(opened, settles=True)
                self._lease.update(round=self._promised_round())
            if self.settings.overlap_steps == 0:
                self.set_state("waiting")
            settled = self._settle(opened)
            return MissedRound() if opened.sent is None else settled
        finally:
            if opened.sent is not None:  # also after an error before it is settled
                opened.sent.close()

    def _settle(self, opened: InflightRound) -> RoundResult:
        """Settle a round with the contribution of this process or of an earlier one."""
        while True:
            earlier = None if opened.sent else self.progress.earlier_contributor(opened.round)
            try:
                return self._exchange.settle(
                    opened.round,
                    base=opened.base,
                    sent=opened.sent,
                    timings=opened.timings,
                    earlier=earlier,
                )
            except ContributionLost as lost:
                log.error("%s; this process contributes instead", lost)
                self.progress.replace_earlier(opened.round)
                self.contribute(opened, settles=True)

    def _is_decided(self, round: int) -> bool:
        try:
            return self._round_observer.commit_of(round) is not None
        except Damaged:
            return True

    def contribute(self, opened: InflightRound, *, settles: bool = False) -> None:
        """Upload the contribution to an open round, which the caller ``settles`` next or not."""
        self._check()
        opened.sent = self._exchange.contribute(
            opened.round,
            base=opened.base,
            model_hash=self.state.layout.model_hash,
            vector=opened.contributed,
            work=opened.work,
            rounds_here=self.progress.rounds_here,
            timings=opened.timings,
            settles=settles,
        )
        self._partial_rounds.contributed(opened.timings)

    def close_round(self) -> StopReason | None:
        """Wait for the oldest open round and apply it; then run the post-round tasks."""
        opened = self.inflight.first()
        overlapping = self.settings.overlap_steps > 0
        if overlapping:
            self.set_state("waiting")
        start_s = self._clock.monotonic()
        exchanged = self._await_exchange(opened)
        blocked_s = self._clock.monotonic() - start_s
        self.set_state("applying")
        start_s = self._clock.monotonic()
        if isinstance(exchanged, RoundResult):
            outcome = self._apply(opened, exchanged)
        else:
            self.catch_up(opened)
            outcome = "late"
        apply_s = self._clock.monotonic() - start_s
        commit = self._commit_for_report(opened.round)
        assert commit is not None, "an exchange ends with a commit"
        report = self.tasks.report(
            commit, outcome, opened, blocked_s=blocked_s, apply_s=apply_s, overlapping=overlapping
        )
        refusal = exchanged.refusal if isinstance(exchanged, RoundResult) else None
        del opened, exchanged  # frees their vectors, before the replica state is copied
        try:
            if refusal:
                self._refused(refusal.kind, refusal.reason)
            assert self.state.last_commit is not None
            return self.after(self.state.last_commit)
        finally:
            self.tasks.send(report)

    def await_contributions(self) -> None:
        """Wait until the contributions to the rounds in flight are durable."""

        def is_durable(opened: InflightRound) -> bool:
            is_earlier = self.progress.earlier_contributor(opened.round) is not None
            return opened.sent is not None or is_earlier

        self.inflight.await_contributions(self._check, is_durable=is_durable)

    def _await_exchange(self, opened: InflightRound) -> ExchangeOutcome:
        """Wait for the exchange of the oldest open round; log why it has no result."""
        exchanged: ExchangeOutcome = MissedRound()
        try:
            exchanged = self.inflight.close(
                self._check, meanwhile=self._rescue.look, afterwards=self.tasks.finish_checkpoint
            )
        except RunOver as over:
            log.info("round %d does not happen: %s", opened.round, over)
        except CannotReduce as error:
            log.error("round %d is committed but cannot be read here: %s", opened.round, error)
            return exchanged
        if isinstance(exchanged, MissedRound):
            if self.progress.earlier_contributor(opened.round):
                log.info("an earlier process had contributed to round %d", opened.round)
            else:
                log.warning("round %d was committed without this replica: late", opened.round)
        return exchanged

    def _commit_for_report(self, round: int) -> Commit | None:
        try:
            return self._round_observer.commit_of(round) or self.state.last_commit
        except Damaged:
            return self.state.last_commit

    def _apply(self, opened: InflightRound, settled: RoundResult) -> str:
        """Apply a settled round; return the outcome of this replica's contribution."""
        if settled.plan is not None:
            self._dynamic_steps.update(settled.plan)
        opened.cosine = settled.cosine
        kind = settled.refusal.kind if settled.refusal else ""
        keep = NOTHING if settled.commit.void else self.progress.late_share.of(settled.plan)
        outcome = self.progress.apply(settled.commit, settled.merged, opened, keep=keep)
        if kind == "quarantine":
            self.progress.discard()
        return outcome

    def _refused(self, kind: str, reason: str) -> None:
        """Handle a contribution that a plan excluded. After a refusal the state of this replica is
        suspect, so it is reloaded from a checkpoint."""
        if kind != "refused":
            log.warning("this replica's contribution did not count (%s): %s", kind, reason)
            return
        log.error("this replica's contribution was refused: %s", reason)
        self._catch_up.reload(at_least=0)
        self.catch_up(None)

    def _discard_non_finite(self) -> StopReason | None:
        """Discard non-finite local weights, which must not reach the group."""
        self.progress.discard_non_finite(self.round)
        self._inner.reset()
        self.catch_up(None)
        self._begin_round(self.round)
        self._lease.update(round=self.round + 1)  # the group does not wait for this replica
        commit = self.state.last_commit
        return self.after(commit) if commit and commit.last else None

    def after(self, commit: Commit) -> StopReason | None:
        """Run the post-round tasks; then begin or continue a round, or end training."""
        self.tasks.after(commit)
        if commit.last:
            full = commit.committed_total >= self.settings.total_rounds
            return StopReason.COMPLETED if full else StopReason.TOKEN_LIMIT
        self._rescue.look()
        if self.round < self.state.round:
            self._begin_round(self.state.round)
        else:
            self.counter.resume()
            self.set_state("computing")
        return None

    # -- ending ----------------------------------------------------------------------------------

    def save(self, give_up: Callable[[], bool]) -> None:
        """Close the loop and save the replica state for the next process."""
        began = self.inflight.first().began if len(self.inflight) else self.counter.round_began
        self.resumption.save(
            self.close(give_up), round=self.round, data_step=self.data_step, began=began
        )
        self._rescue.repair_commits(self._round_observer.known_commits())

    def close(self, give_up: Callable[[], bool]) -> list[InflightRound]:
        """Stop the exchanges in flight; end the writes in the background, which are cancelled once
        ``give_up`` returns True. Return the rounds whose contribution is durable."""
        self._closed = True
        contributed = self.inflight.end()
        self.tasks.close(give_up)
        return contributed

    # -- helpers ---------------------------------------------------------------------------------

    def set_state(self, state: str) -> None:
        """Show ``state`` in the lease and the telemetry."""
        round_s = self._round_steps * self.counter.step_s
        left_s = round_s - self.counter.steps_in_round * self.counter.step_s
        self._lease.update(
            state=state,
            round=self._promised_round(),
            step=self.data_step,
            message="",
            calm=state == "computing" and not len(self.inflight),
            is_short_round=is_short_round(round_s, self.settings.heartbeat_timeout_s),
            ends_s=self._clock.monotonic() + left_s,
        )
        self._context.telemetry.phase(state=state, round=self.round)

    def _promised_round(self) -> int:
        """Return the oldest round for which the group can wait for this replica: the oldest one
        without a durable contribution."""
        return self.inflight.unsent() or self.round

    def _check(self) -> None:
        if self._closed:
            raise StopTraining(StopReason.CLOSED)
        self._group_check()
