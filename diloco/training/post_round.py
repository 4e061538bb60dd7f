"""Tasks of a replica after each commit: evaluate, write checkpoints, save its state, report.

Evaluations and checkpoints are of the *global* weights; after each commit they are scheduled on one
replica (:mod:`diloco.training.final_export`). Every replica saves its own state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from diloco.exchange.inflight_rounds import InflightRound
from diloco.model.inner_state import Inner
from diloco.protocol.records import CheckpointManifest, Commit
from diloco.protocol.telemetry import Evaluation, RoundReport
from diloco.store.base import StoreError
from diloco.store.metered import StoreUsage
from diloco.training.background import CHECKPOINT, PACKS, STATE, BackgroundWrites
from diloco.training.checkpoint import manifest_rounds, save_checkpoint
from diloco.training.context import ReplicaContext
from diloco.training.final_export import checkpointer, evaluator
from diloco.training.hooks import NoWatcher, RoundHooks, RoundWatcher
from diloco.training.initial_state import checkpoint_wait_s
from diloco.training.local_progress import LocalProgress
from diloco.training.progress import OnRound, RoundProgress
from diloco.training.replica_state import EarlyContribution, ReplicaState, StateWriter
from diloco.training.round_packs import pack_rounds
from diloco.training.sweep import sweep

log = logging.getLogger(__name__)

Evaluate = Callable[[], tuple[float, int]]
"""Evaluates the model; returns (mean loss in nats per token, tokens evaluated)."""

NO_EARLY: Mapping[int, EarlyContribution] = {}


class PostRoundTasks:
    """The tasks of one replica.

    ``tokens_before`` are the tokens that earlier processes of the replica have trained;
    ``checkpoint_requested`` makes this replica write a checkpoint after the next commit that is not
    void; ``before_first`` has the seconds of each phase before the first round, reported with it.
    """

    def __init__(
        self,
        context: ReplicaContext,
        progress: LocalProgress,
        inner: Inner,
        evaluate: Evaluate | None,
    ) -> None:
        self.last_evaluation: Evaluation | None = None
        self.on_round: OnRound | None = None
        self.hooks = RoundHooks()
        self.watcher: RoundWatcher = NoWatcher()
        self.checkpoint_requested = False
        self.tokens_before = 0
        self.before_first: dict[str, float] = {}
        self._context = context
        self._identity = context.identity
        self._store = context.store
        self._lease = context.lease
        self._telemetry = context.telemetry
        self._settings = context.settings
        self._clock = context.clock
        self._state = progress.state
        self._progress = progress
        self._inner = inner
        self._evaluate = evaluate
        self._reported = StoreUsage()
        self._other_s = 0.0  # of :meth:`after`, since the last report
        self._saved_round = 0
        self._saved_after: int | None = None
        self._checkpoint_round = 0
        self._writes = BackgroundWrites(
            clock=context.clock, longest_pause_s=checkpoint_wait_s(context.settings)
        )
        self._state.before_change = partial(self._writes.finish, CHECKPOINT)

    # -- after a commit --------------------------------------------------------------------------

    def after(self, commit: Commit) -> None:
        """Run the tasks that are due after ``commit`` has been applied."""
        if commit.void:
            return
        start_s = self._clock.monotonic()
        try:
            self._run_due(commit)
        finally:
            self._other_s += self._clock.monotonic() - start_s

    def _run_due(self, commit: Commit) -> None:
        count, settings = commit.committed_total, self._settings
        evaluate = settings.eval_every and (commit.last or count % settings.eval_every == 0)
        if evaluate and self._identity == evaluator(commit):
            self._evaluate_global(commit)
        due = commit.last or count % settings.checkpoint_every == 0 or self._save_is_due(commit)
        mine = due and self._is_checkpointer(commit)
        if (mine or self.checkpoint_requested) and self._context.can_create():
            self.checkpoint(commit)
            self.checkpoint_requested = False
            if self._settings.pack_records == "on" and not commit.last:
                self._start_packing()
        if settings.state_every and count % settings.state_every == 0 and not commit.last:
            self.save_own()

    def _is_checkpointer(self, commit: Commit) -> bool:
        """Return whether this replica writes the checkpoint of a commit. Without atomic create, the
        coordinator writes all of them."""
        return self._identity == checkpointer(commit) or not self._store.atomic_create

    def _save_is_due(self, commit: Commit) -> bool:
        """Return whether a ``save`` command requires a checkpoint that does not exist yet. Only the
        replica scheduled to write the checkpoint checks."""
        after = self._lease.save_after
        is_new = after is not None and after != self._saved_after and commit.round > after
        if after is None or not is_new or not self._is_checkpointer(commit):
            return False
        self._saved_after = after
        return max(manifest_rounds(self._store), default=0) <= after

    def _evaluate_global(self, commit: Commit) -> None:
        if self._evaluate is None:
            return
        is_global = self._settings.num_fragments == 1 and self._settings.overlap_steps == 0
        with nullcontext() if is_global else self._state.shown():
            loss, tokens = self._evaluate()
        log.info("evaluation after round %d: loss %.4f nats per token", commit.round, loss)
        self.last_evaluation = Evaluation(
            round=commit.round, loss=loss, tokens=tokens, wall_s=self._clock.wall()
        )
        self._telemetry.evaluation(self.last_evaluation)

    def rewrite_checkpoint(self, commit: Commit) -> None:
        """Replace the damaged checkpoint of ``commit``."""
        self.checkpoint(commit, replace=True)

    def checkpoint(self, commit: Commit, *, replace: bool = False) -> None:
        """Start writing the global weights after ``commit``, the last one applied, in the
        background; unless that is under way."""
        under_way = self._writes.is_running(CHECKPOINT) and self._checkpoint_round == commit.round
        if under_way and not replace:
            return
        self._checkpoint_round = commit.round
        state = self._state
        weights, outer = state.snapshot()
        write = partial(
            save_checkpoint,
            self._store,
            self._identity,
            state.layout,
            round=commit.round,
            weights=weights,
            base_rounds=tuple(base.round for base in state.bases),
            outer=outer,
            totals=state.totals,
            wall_s=self._clock.wall(),
            replace=replace,
            check=partial(self._writes.check, CHECKPOINT),
            storage=self._context.storage,
        )
        self._writes.start(CHECKPOINT, partial(self._write_checkpoint, write))

    def _write_checkpoint(self, write: Callable[[], CheckpointManifest | None]) -> None:
        """Write a checkpoint; delete old objects."""
        manifest = write()
        if manifest is not None:
            log.info("checkpoint of round %d is complete", manifest.round)
            try:
                sweep(self._store, rounds_kept=self._settings.residual_rounds)
            except StoreError as error:
                log.warning("could not delete old objects, a later sweep will retry: %s", error)

    def _start_packing(self) -> None:
        """Start packing the records of old rounds in the background, unless that is under way. No
        outer step waits for it."""
        if not self._writes.is_running(PACKS):
            self._writes.start(PACKS, self._pack)

    def _pack(self) -> None:
        kept, check = self._settings.residual_rounds, partial(self._writes.check, PACKS)
        try:
            pack_rounds(self._store, rounds_kept=kept, check=check)
        except StoreError as error:
            log.warning("could not pack old records, a later call will retry: %s", error)

    def save_own(self) -> None:
        """Save the replica state: inner optimizer, residuals, data position. At most once a
        round. The state is copied; the copy is written in the background."""
        commit = self._state.last_commit
        if commit is None or commit.round == self._saved_round:
            return
        self.finish_state()
        if writer := self._state_writer(self._progress.open_early()):
            writer.copy()
            self._writes.start(STATE, partial(self._write_own, writer, commit.round))

    def finish_checkpoint(self) -> None:
        """Wait until the checkpoint is written; a replica that has to leave does not. The lease
        shows it. Raises the store's errors, :class:`~diloco.errors.StopTraining`, and
        :class:`~diloco.errors.ReplicaError` for a write without progress."""

        def check() -> None:
            self._lease.update(message=f"writing the checkpoint of round {self._checkpoint_round}")
            self._context.check()

        self._writes.finish(CHECKPOINT, check)

    def finish_state(self) -> None:
        """Wait until the copy of the replica state is written; see :meth:`finish_checkpoint`."""
        self._writes.finish(STATE, self._context.check)

    def _write_own(self, writer: StateWriter, round: int) -> None:
        writer.write(
            self._store,
            self._identity,
            wall_s=self._clock.wall(),
            check=partial(self._writes.check, STATE),
        )
        self._saved_round = round

    def save_leaving(
        self, early: Mapping[int, EarlyContribution], *, data_step: int, lost_tokens: int
    ) -> None:
        """Save the replica state with its early contributions and data step for the next process.
        Nothing changes the state any more, so it is written without a copy.

        Without early contributions, the next process continues at the last commit; if the state was
        saved there, that state is kept.
        """
        commit = self._state.last_commit
        if not early and commit is not None and commit.round == self._saved_round:
            return
        if writer := self._state_writer(early, data_step, lost_tokens):
            wall_s = self._clock.wall()
            writer.write(self._store, self._identity, wall_s=wall_s, name="left", replaces=True)

    def close(self, give_up: Callable[[], bool]) -> None:
        """End the writes in the background; see :meth:`BackgroundWrites.close`."""
        self._writes.close(give_up)

    def _state_writer(
        self,
        early: Mapping[int, EarlyContribution] = NO_EARLY,
        data_step: int = 0,
        lost_tokens: int = 0,
    ) -> StateWriter | None:
        """Return the writer of the replica state, which it does not copy; None if it cannot be
        saved."""
        try:
            storage = self._context.storage
            make: Callable[[ReplicaState], StateWriter] = (
                storage.state_writer if storage else StateWriter
            )
            return make(
                ReplicaState(
                    round=self._state.round - 1,
                    tokens=self._lease.progress.tokens - lost_tokens,
                    trees=self._inner.save(),
                    residuals=self._progress.saved_residuals(),
                    early=early,
                    data_step=data_step,
                )
            )
        except TypeError as error:
            log.error("could not save the replica state: %s", error)
            return None

    # -- reports ---------------------------------------------------------------------------------

    def report(
        self,
        commit: Commit,
        outcome: str,
        opened: InflightRound,
        *,
        blocked_s: float,
        apply_s: float,
        overlapping: bool,
    ) -> RoundReport:
        """Create the report of a round for :meth:`send`.

        With overlap the exchange runs in the background, and only the time for which the training
        loop was blocked (``blocked_s``) counts as waiting.
        """
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
        used, before = replace(self._context.metered.usage), self._reported
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
            # After catching up over several rounds, the weights after this one are gone.
            weights_digest=base.digest if base.round <= opened.round else "",
        )
        log.info("round %d: %s, %d contributors", opened.round, outcome, len(commit.contributors))
        progress = RoundProgress(
            round=opened.round,
            total_rounds=self._settings.total_rounds,
            committed=commit.committed_total,
            contributors=len(commit.contributors),
            outcome=outcome,
            loss=commit.loss,
            tokens=commit.tokens_total,
            waited_s=blocked_s,
        )
        if self.on_round is not None:
            self.on_round(progress)
        self.watcher.after(opened.round, outcome)
        self.hooks.after(progress)
        return report

    def send(self, report: RoundReport) -> None:
        """Send a report once :meth:`after` has run; its duration is the phase ``other``."""
        if self._other_s > 0:
            report = replace(report, phases={**report.phases, "other": self._other_s})
        self._other_s = 0.0
        self._telemetry.round(report)
