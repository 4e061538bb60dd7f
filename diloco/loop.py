"""The round loop: join, exchange, apply, again. What a member does between inner steps.

Every method that can end the run returns the reason (completed, token_limit, or the final
manifest's own), or '' to go on. Waiting is left by an exception from ``check``
(:class:`~diloco.errors.Leaving`, :class:`~diloco.errors.FencedOut`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from diloco.checkpoint import read_final, save_checkpoint, sweep
from diloco.exchange import Exchange, Timings
from diloco.finish import checkpointer, evaluator
from diloco.layout import Layout
from diloco.membership import Lease, Observer
from diloco.outer import OuterOptimizer
from diloco.reduce import CannotReduce, Merged
from diloco.rendezvous import keys
from diloco.rendezvous.clock import Clock
from diloco.rendezvous.records import Commit
from diloco.rendezvous.settings import GroupSettings
from diloco.rendezvous.store import MeteredStore, Store, StoreUsage
from diloco.rendezvous.telemetry import Evaluation, RoundReport
from diloco.reporter import Reporter
from diloco.state import GlobalState, is_finite
from diloco.sync import first_state, newest_state
from diloco.work import Work

log = logging.getLogger(__name__)

START_POLL_S = 0.25

Evaluate = Callable[[], tuple[float, int]]
"""Evaluates the model as it is; returns (mean loss in nats per token, tokens evaluated)."""


@dataclass(frozen=True)
class _Trip:
    """One exchange's books: phase timings, and the store's counters before it."""

    timings: Timings
    before: StoreUsage


class RoundLoop:
    """One member's rounds. Owns the global state, the books of local work and the exchange."""

    def __init__(
        self,
        store: Store,
        metered: MeteredStore,
        settings: GroupSettings,
        *,
        layout: Layout,
        inner_optimizer: torch.optim.Optimizer,
        evaluate: Evaluate | None,
        lease: Lease,
        reporter: Reporter,
        clock: Clock,
        check: Callable[[], None],
    ) -> None:
        self.identity = lease.identity
        self.settings = settings
        outer = OuterOptimizer(
            lr=settings.outer_lr, momentum=settings.outer_momentum, numel=layout.numel
        )
        self.state = GlobalState(layout, outer)
        self.work = Work(clock)
        self.last_evaluation: Evaluation | None = None
        self._store = store
        self._metered = metered
        self._inner_optimizer = inner_optimizer
        self._evaluate = evaluate
        self._lease = lease
        self._reporter = reporter
        self._clock = clock
        self._check = check
        self._observer = Observer(store, clock=clock, timeout_s=settings.heartbeat_timeout_s)
        self._exchange = Exchange(
            store,
            self.identity,
            settings,
            clock=clock,
            observer=self._observer,
            model_hash=layout.model_hash,
            numel=layout.numel,
            check=check,
            on_wait=lambda why: lease.update(message=why),
        )

    @property
    def round(self) -> int:
        return self.state.round

    @property
    def data_step(self) -> int:
        return (self.round - 1) * self.settings.sync_every + self.work.steps_in_round

    # -- joining ---------------------------------------------------------------------------------

    def start(self) -> str:
        """Take the group's state and begin the first round, unless the run is over."""
        self.say("syncing")
        layout = self.state.layout
        log.info("model %s, %d parameters", layout.model_hash, layout.numel)
        first_state(self._store, self.identity, layout, self.state.outer, self._clock, self._check)
        self._reload(at_least=0)
        self._catch_up()
        commit, final = self.state.last_commit, read_final(self._store)
        if final is not None:
            return final.reason
        if commit is not None and commit.last:
            return self._after_commit(commit)
        if commit is None:
            self._wait_for_everybody()
        self._begin_round()
        return ""

    def _reload(self, *, at_least: int) -> None:
        """Take the newest checkpoint, of round ``at_least`` or later; local work is dropped."""
        state = self.state
        restored = newest_state(
            self._store, state.layout, state.outer, at_least, self._clock, self._check
        )
        state.load(restored, self._exchange.commit_of(restored.round) if restored.round else None)
        self.work.reset()

    def _catch_up(self) -> None:
        """Apply every commit there is from :attr:`round` on."""
        while (commit := self._exchange.commit_of(self.round)) is not None:
            self.say("syncing")
            try:
                merged = self._exchange.replay(commit)
            except CannotReduce as error:
                log.warning("round %d cannot be replayed: %s", commit.round, error)
                # Nobody need wait for this replica until there is a checkpoint it can start from.
                self._lease.update(round=commit.round + self.settings.checkpoint_every)
                self._reload(at_least=commit.round)
            else:
                self._apply(commit, merged)

    def _wait_for_everybody(self) -> None:
        """Before round 1: wait for all target replicas, at most ``start_wait_s``."""
        give_up_s = self._clock.monotonic() + self.settings.start_wait_s
        target = self.settings.num_replicas
        while self._clock.monotonic() < give_up_s:
            self._observer.look()
            live = len(self._observer.live() | {self.identity.replica})
            if live >= target or self._store.list(keys.contributions(1)):
                return
            self._lease.update(message=f"{live} of {target} replicas are here")
            self._check()
            self._clock.sleep(START_POLL_S)
        log.warning("started without all replicas after %g s", self.settings.start_wait_s)

    # -- one round -------------------------------------------------------------------------------

    def _begin_round(self) -> None:
        self.work.begin_round()
        self._exchange.forget_before(self.round)
        self.say("computing")

    def synchronise(self) -> str:
        """Exchange with the group, then begin the next round."""
        trip = _Trip(
            timings=Timings(self._clock, {"compute": self.work.compute_in_round_s}),
            before=replace(self._metered.usage),
        )
        late = self._exchange.commit_of(self.round)
        if late is not None:
            log.warning("round %d was committed without this replica: it was late", self.round)
            return self._be_late(late, trip)
        self.say("uploading")
        gradient = self.state.pseudo_gradient()
        if not is_finite(gradient):
            return self._discard_local()
        sent = self._exchange.contribute(
            self.round,
            base=self.state.base,
            gradient=gradient,
            work=self.work.since_base(),
            timings=trip.timings,
        )
        del gradient
        self.say("waiting")
        try:
            settled = self._exchange.settle(
                self.round,
                base=self.state.base,
                totals=self.state.totals,
                sent=sent,
                timings=trip.timings,
            )
        except CannotReduce as error:
            log.error("round %d is committed but cannot be read here: %s", self.round, error)
            commit = self._exchange.commit_of(self.round)
            assert commit is not None, "only a committed round is reduced to the end"
            return self._be_late(commit, trip)
        self.say("applying")
        start_s = self._clock.monotonic()
        outcome = self._apply(settled.commit, settled.merged)
        trip.timings.add("apply", self._clock.monotonic() - start_s)
        self._report(settled.commit, outcome, trip, norm=sent.record.norm)
        if settled.refusal:
            log.error("this replica's contribution was refused: %s", settled.refusal)
            self._reload(at_least=0)
            self._catch_up()
        return self._after_commit(settled.commit)

    def _be_late(self, commit: Commit, trip: _Trip) -> str:
        """Rebase on what was committed without this replica, and go on."""
        self._catch_up()
        self._report(commit, "late", trip, norm=float("nan"))
        assert self.state.last_commit is not None
        return self._after_commit(self.state.last_commit)

    def _apply(self, commit: Commit, merged: Merged | None) -> str:
        """Take the outer step of a commit; what became of this replica's work in it."""
        included = merged is not None and self.identity in commit.contributors
        if included:
            self.work.reset()
        self.state.apply(commit, merged, rebase=self.work.steps > 0)
        if commit.void:
            log.error("round %d is void: %s", commit.round, commit.void)
            return "void"
        return "included" if included else "late"

    def _discard_local(self) -> str:
        """Non-finite local weights: nothing of them may reach the group."""
        log.error(
            "round %d: expected finite weights, found NaN or infinity; %d steps of local work "
            "are discarded and the inner optimizer is reset",
            self.round,
            self.work.steps,
        )
        self.state.discard_local()
        self._inner_optimizer.state.clear()
        self.work.reset()
        self._begin_round()
        self._lease.update(round=self.round + 1)  # nobody need wait for this replica
        return ""

    def _after_commit(self, commit: Commit) -> str:
        """What whoever's turn it is does beside training; then the next round or the end."""
        if not commit.void:
            every = self.settings.eval_every
            evaluate = every and (commit.last or commit.committed_total % every == 0)
            if evaluate and self.identity == evaluator(commit):
                self._evaluate_global(commit)
            save = commit.last or commit.committed_total % self.settings.checkpoint_every == 0
            if save and self.identity == checkpointer(commit):
                self._checkpoint(commit.round)
        if commit.last:
            full = commit.committed_total >= self.settings.total_rounds
            return "completed" if full else "token_limit"
        self._begin_round()
        return ""

    def _evaluate_global(self, commit: Commit) -> None:
        if self._evaluate is None:
            return
        loss, tokens = self._evaluate()
        log.info("evaluation after round %d: loss %.4f nats per token", commit.round, loss)
        self.last_evaluation = Evaluation(
            round=commit.round, loss=loss, tokens=tokens, wall_s=self._clock.wall()
        )
        self._reporter.evaluation(self.last_evaluation)

    def _checkpoint(self, round: int) -> None:
        assert self.state.weights is not None
        manifest = save_checkpoint(
            self._store,
            self.identity,
            self.state.layout,
            round=round,
            weights=self.state.weights,
            outer=self.state.outer,
            totals=self.state.totals,
            wall_s=self._clock.wall(),
        )
        if manifest is not None:
            log.info("checkpoint of round %d is complete", round)
            sweep(self._store)

    def say(self, state: str) -> None:
        self._lease.update(state=state, round=self.round, step=self.data_step, message="")
        self._reporter.phase(state=state, round=self.round)

    def _report(self, commit: Commit, outcome: str, trip: _Trip, *, norm: float) -> None:
        used, before = self._metered.usage, trip.before
        self._reporter.round(
            RoundReport(
                round=commit.round,
                outcome=outcome,
                started_wall_s=self.work.round_started_wall_s,
                committed_wall_s=self._clock.wall(),
                phases=trip.timings.seconds,
                requests=used.requests - before.requests,
                bytes_up=used.bytes_up - before.bytes_up,
                bytes_down=used.bytes_down - before.bytes_down,
                norm=norm,
                update_norm=self.state.update_norm,
                contributors=len(commit.contributors),
                weights_digest=self.state.base.digest,
            )
        )
        log.info("round %d: %s, %d contributors", commit.round, outcome, len(commit.contributors))
