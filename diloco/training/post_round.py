"""What a member does beside training: evaluate, checkpoint, save its own state, report.

Evaluation and checkpoints are of the *global* weights and one member's turn after each commit
(:mod:`diloco.training.final_export`); a replica's own state is everybody's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from diloco.clock import Clock
from diloco.exchange.error_feedback import Residuals
from diloco.exchange.inflight_rounds import OpenRound
from diloco.membership.lease import Lease
from diloco.model.inner_state import Inner
from diloco.protocol.records import Commit
from diloco.protocol.settings import GroupSettings
from diloco.protocol.telemetry import Evaluation, RoundReport
from diloco.store.base import MeteredStore, Store, StoreError, StoreUsage
from diloco.telemetry.writer import Reporter
from diloco.training.checkpoint import manifest_rounds, save_checkpoint, sweep
from diloco.training.final_export import checkpointer, evaluator
from diloco.training.global_state import GlobalState
from diloco.training.progress import OnRound, RoundProgress
from diloco.training.replica_state import HandedIn, ReplicaState, save_replica_state

log = logging.getLogger(__name__)

Evaluate = Callable[[], tuple[float, int]]
"""Evaluates the model as it is; returns (mean loss in nats per token, tokens evaluated)."""


NOTHING: Mapping[int, HandedIn] = {}


class Chores:
    def __init__(
        self,
        store: Store,
        metered: MeteredStore,
        state: GlobalState,
        inner: Inner,
        lease: Lease,
        reporter: Reporter,
        evaluate: Evaluate | None,
        settings: GroupSettings,
        clock: Clock,
        *,
        may_create: Callable[[], bool],
    ) -> None:
        self.last_evaluation: Evaluation | None = None
        self.on_round: OnRound | None = None
        self.tokens_before = 0
        """Trained by earlier processes of this replica."""
        self.before_first: dict[str, float] = {}
        """Seconds by phase that went by before the first round, told with it."""
        self._identity = lease.identity
        self._store = store
        self._metered = metered
        self._state = state
        self._inner = inner
        self._lease = lease
        self._reporter = reporter
        self._evaluate = evaluate
        self._settings = settings
        self._clock = clock
        self._may_create = may_create
        self._reported = StoreUsage()
        self._other_s = 0.0  # of :meth:`after`, since the last report
        self._saved_round = 0

    # -- after a commit --------------------------------------------------------------------------

    def after(self, commit: Commit, residuals: Residuals) -> None:
        """What is this member's to do now that ``commit`` has been applied."""
        if commit.void:
            return
        start_s = self._clock.monotonic()
        try:
            self._take_turns(commit, residuals)
        finally:
            self._other_s += self._clock.monotonic() - start_s

    def _take_turns(self, commit: Commit, residuals: Residuals) -> None:
        count, settings = commit.committed_total, self._settings
        evaluate = settings.eval_every and (commit.last or count % settings.eval_every == 0)
        if evaluate and self._identity == evaluator(commit):
            self._evaluate_global(commit)
        if commit.last or count % settings.checkpoint_every == 0 or self._save_is_due(commit):
            # Where only one may create, it is always its turn.
            mine = self._identity == checkpointer(commit) or not self._store.atomic_create
            if mine and self._may_create():
                self.checkpoint(commit)
        if settings.state_every and count % settings.state_every == 0 and not commit.last:
            self.save_own(residuals)

    def _save_is_due(self, commit: Commit) -> bool:
        """Whether a checkpoint was asked for that nobody has written yet. Only whose turn it is to
        write one looks; who has it behind him forgets it."""
        after = self._lease.save_after
        mine = self._identity == checkpointer(commit) or not self._store.atomic_create
        if after is None or commit.round <= after or not mine:
            return False
        self._lease.save_after = None
        return max(manifest_rounds(self._store), default=0) <= after

    def _evaluate_global(self, commit: Commit) -> None:
        if self._evaluate is None:
            return
        layout, weights = self._state.layout, self._state.weights
        assert weights is not None
        whole = self._settings.num_fragments == 1 and self._settings.overlap_steps == 0
        local = None if whole else layout.read()
        if local is not None:
            layout.write(weights)
        loss, tokens = self._evaluate()
        if local is not None:
            layout.write(local)
        log.info("evaluation after round %d: loss %.4f nats per token", commit.round, loss)
        self.last_evaluation = Evaluation(
            round=commit.round, loss=loss, tokens=tokens, wall_s=self._clock.wall()
        )
        self._reporter.evaluation(self.last_evaluation)

    def rewrite_checkpoint(self, commit: Commit) -> None:
        """Write the checkpoint of ``commit`` in the place of a damaged one."""
        self.checkpoint(commit, replace=True)

    def checkpoint(self, commit: Commit, *, replace: bool = False) -> None:
        """Write the global weights after ``commit``, which is the last one applied, and sweep."""
        state = self._state
        assert state.weights is not None
        manifest = save_checkpoint(
            self._store,
            self._identity,
            state.layout,
            round=commit.round,
            weights=state.weights,
            base_rounds=tuple(base.round for base in state.bases),
            outer=state.outer,
            totals=state.totals,
            wall_s=self._clock.wall(),
            replace=replace,
        )
        if manifest is not None:
            log.info("checkpoint of round %d is complete", commit.round)
            try:
                sweep(self._store)
            except StoreError as error:
                log.warning("old objects stay until a later sweep: %s", error)

    def save_own(self, residuals: Residuals) -> None:
        """Save inner optimizer, residual and data position, once a round at most."""
        commit = self._state.last_commit
        if commit is not None and commit.round != self._saved_round:
            self._save(residuals, name="state")
            self._saved_round = commit.round

    def save_leaving(
        self,
        residuals: Residuals,
        handed_in: Mapping[int, HandedIn],
        *,
        data_step: int,
        lost_tokens: int,
    ) -> None:
        """The same for the next process, with what was handed in and where it is to go on. Where
        nothing was, it goes on at the last commit, and what was saved then is the better state."""
        commit = self._state.last_commit
        if not handed_in and commit is not None and commit.round == self._saved_round:
            return
        self._save(residuals, handed_in, data_step, lost_tokens, name="left")

    def _save(
        self,
        residuals: Residuals,
        handed_in: Mapping[int, HandedIn] = NOTHING,
        data_step: int = 0,
        lost_tokens: int = 0,
        *,
        name: str,
    ) -> None:
        state = ReplicaState(
            round=self._state.round - 1,
            tokens=self._lease.progress.tokens - lost_tokens,
            trees=self._inner.save(),
            residuals={n: e for n, e in enumerate(residuals.of) if e is not None},
            handed_in=handed_in,
            data_step=data_step,
        )
        try:
            save_replica_state(
                self._store, self._identity, state, wall_s=self._clock.wall(), name=name
            )
        except TypeError as error:
            log.error("the replica's own state is not saved: %s", error)

    # -- reports ---------------------------------------------------------------------------------

    def report(
        self,
        commit: Commit,
        outcome: str,
        opened: OpenRound,
        *,
        blocked_s: float,
        apply_s: float,
        overlapping: bool,
    ) -> RoundReport:
        """How a round went, for :meth:`send`. With overlap the exchange is in the background, and
        only the time that the training loop was blocked counts as waiting."""
        phases = {"compute": opened.compute_s, "apply": apply_s}
        background = {}
        if overlapping:
            phases["wait"] = blocked_s
            background = opened.timings.seconds
        else:
            phases |= opened.timings.seconds
        for phase, seconds in self.before_first.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
        self.before_first = {}
        used, before = replace(self._metered.usage), self._reported
        self._reported = used
        base = self._state.bases[opened.fragment]
        report = RoundReport(
            round=opened.round,
            outcome=outcome,
            started_wall_s=opened.started_wall_s,
            committed_wall_s=self._clock.wall(),
            phases=phases,
            background=background,
            requests=used.requests - before.requests,
            bytes_up=used.bytes_up - before.bytes_up,
            bytes_down=used.bytes_down - before.bytes_down,
            norm=opened.sent.record.norm if opened.sent else float("nan"),
            cosine=opened.cosine if outcome == "included" else None,
            update_norm=self._state.update_norm,
            contributors=len(commit.contributors),
            # Who has caught up over several rounds no longer has the weights after this one.
            weights_digest=base.digest if base.round <= opened.round else "",
        )
        log.info("round %d: %s, %d contributors", opened.round, outcome, len(commit.contributors))
        if self.on_round is not None:
            self.on_round(
                RoundProgress(
                    round=opened.round,
                    total_rounds=self._settings.total_rounds,
                    committed=commit.committed_total,
                    contributors=len(commit.contributors),
                    outcome=outcome,
                    loss=commit.loss,
                    tokens=commit.tokens_total,
                    waited_s=blocked_s,
                )
            )
        return report

    def send(self, report: RoundReport) -> None:
        """Tell it, when :meth:`after` is done: what that took is the round's ``other``."""
        if self._other_s > 0:
            report = replace(report, phases={**report.phases, "other": self._other_s})
        self._other_s = 0.0
        self._reporter.round(report)
