"""Taking part in a group: :func:`join` and the round loop behind :meth:`Group.step`.

::

    group.json ─► join: claim incarnation, lease, checkpoint 0 or newest + log replay
                   │
        ┌──► H inner steps, the caller's own loop ──► group.step(...)
        │          │ every H-th call
        │    base - local ─► contribute ─► settle (plan, reduce, commit) ─► outer step
        └──────────┴── local := global (included) or rebased (late)

    last commit ─► final weights, config, summary

The caller owns model, data and inner optimizer; the group owns the global weights (fp32, CPU), the
outer optimizer and everything that goes through the store. What it leaves out for now: fragments
and overlap (one fragment, exchanged while the caller waits).
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from diloco.checkpoint import publish_final, read_final, save_checkpoint, sweep
from diloco.errors import Leaving, ReplicaError
from diloco.exchange import Base, Exchange, LocalWork, Settled, Timings
from diloco.membership import Lease, Observer, claim_incarnation
from diloco.outer import Layout, OuterOptimizer, digest
from diloco.reduce import CannotReduce, Merged
from diloco.rendezvous import keys
from diloco.rendezvous.clock import Clock, SystemClock
from diloco.rendezvous.records import Commit
from diloco.rendezvous.rounds import Totals
from diloco.rendezvous.settings import GroupDocument, GroupSettings
from diloco.rendezvous.store import MeteredStore, MissingKey, Store, StoreError, open_store
from diloco.rendezvous.telemetry import Evaluation, RoundReport
from diloco.reporter import Number, Reporter
from diloco.retry import RetryingStore
from diloco.sync import first_state, newest_state

log = logging.getLogger(__name__)

Evaluate = Callable[[], tuple[float, int]]
"""Evaluates the model as it is; returns (mean loss in nats per token, tokens evaluated)."""


def read_document(store: Store) -> GroupDocument:
    """``group.json`` of a rendezvous. Raises :class:`ReplicaError` where there is none."""
    try:
        return GroupDocument.from_bytes(store.get(keys.GROUP))
    except MissingKey:
        raise ReplicaError(f"expected {keys.GROUP} under {store.uri}, found none") from None


def join(
    uri: str,
    *,
    model: nn.Module,
    inner_optimizer: torch.optim.Optimizer,
    replica: int | None = None,
    evaluate: Evaluate | None = None,
    config: Mapping[str, Any] | None = None,
    heartbeat_interval_s: float | None = None,
    telemetry_interval_s: float = 2.0,
    store: Store | None = None,
    clock: Clock | None = None,
) -> Group:
    """Take part in the group whose rendezvous is ``uri``; use the result as a context manager.

    ``replica`` is the identity in the run, by default the environment's ``REPLICA_RANK``.
    ``evaluate`` is called with the global weights in the model, on the replica whose turn it is.
    ``config`` goes beside the final weights. On return the model holds the group's global weights.

    Raises :class:`~diloco.errors.ReplicaError` (no such group, another model),
    :class:`~diloco.rendezvous.settings.ProtocolMismatch`,
    :class:`~diloco.rendezvous.settings.SettingsError` or
    :class:`~diloco.rendezvous.store.StoreError`.
    """
    if replica is None:
        replica = int(os.environ["REPLICA_RANK"])
    group = Group(
        store or open_store(uri),
        replica=replica,
        model=model,
        inner_optimizer=inner_optimizer,
        evaluate=evaluate,
        config=config or {},
        heartbeat_interval_s=heartbeat_interval_s,
        telemetry_interval_s=telemetry_interval_s,
        clock=clock,
    )
    group._start()
    return group


class Group:
    """A member of a running group. Made by :func:`join`."""

    def __init__(
        self,
        store: Store,
        *,
        replica: int,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        evaluate: Evaluate | None,
        config: Mapping[str, Any],
        heartbeat_interval_s: float | None,
        telemetry_interval_s: float,
        clock: Clock | None,
    ) -> None:
        self._clock: Clock = clock or SystemClock()
        rng = random.Random(secrets.randbits(64))
        self._metered = MeteredStore(store)
        self._store = RetryingStore(self._metered, clock=self._clock, rng=rng, deadline_s=60.0)
        self.document = read_document(self._store)
        self.settings: GroupSettings = self.document.settings
        settings = self.settings
        if not 0 <= replica < settings.max_replicas:
            raise ReplicaError(
                f"expected a replica number from 0 to {settings.max_replicas - 1}, found {replica}"
            )
        self._model = model
        self._optimizer = inner_optimizer
        self._evaluate = evaluate
        self._config = config
        self._layout = Layout(model)
        self._outer = OuterOptimizer(
            lr=settings.outer_lr, momentum=settings.outer_momentum, numel=self._layout.numel
        )
        self.identity = claim_incarnation(self._store, replica, nonce=secrets.token_hex(4))
        device = next(model.parameters()).device
        # Background threads have a store of their own, so that a round's bytes are the round's.
        background = RetryingStore(store, clock=SystemClock(), rng=rng, deadline_s=10.0)
        self._lease = Lease(
            background,
            self.identity,
            clock=self._clock,
            interval_s=heartbeat_interval_s or min(2.0, settings.heartbeat_timeout_s / 5),
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            device=_device_name(device),
        )
        self._reporter = Reporter(
            background, self.identity, clock=self._clock, interval_s=telemetry_interval_s
        )
        observer = Observer(self._store, clock=self._clock, timeout_s=settings.heartbeat_timeout_s)
        self._observer = observer
        self._exchange = Exchange(
            self._store,
            self.identity,
            settings,
            clock=self._clock,
            observer=observer,
            model_hash=self._layout.model_hash,
            numel=self._layout.numel,
            check=self._check,
            on_wait=lambda why: self._lease.update(message=why),
        )
        self._global = torch.empty(0)
        self._base = Base(round=0, digest="")
        self._totals = Totals()
        self._tokens_seen = 0
        self._last_commit: Commit | None = None
        self._last_evaluation: Evaluation | None = None
        self._leave = threading.Event()
        self._step_started_s = 0.0
        self._round_started_wall_s = 0.0
        self._update_norm = 0.0
        self.done = False
        self.reason = ""
        self.round = 1
        self._reset_work()

    # -- what a training loop reads --------------------------------------------------------------

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    @property
    def schedule_step(self) -> int:
        """Inner steps of the *run* so far: committed rounds x H + steps in this round.

        Learning rates follow it, not the replica's own age, so that a late joiner does not warm up
        again.
        """
        return self._totals.committed * self.settings.sync_every + self._steps_in_round

    @property
    def data_step(self) -> int:
        """A step number that never repeats in the life of a replica number, for drawing data."""
        return (self.round - 1) * self.settings.sync_every + self._steps_in_round

    def leave(self) -> None:
        """Ask this replica to leave cleanly at its next step. Safe in a signal handler."""
        self._leave.set()

    # -- the training loop's one call ------------------------------------------------------------

    def step(
        self,
        *,
        tokens: int,
        loss: Number,
        lr: float | None = None,
        grad_norm: Number = float("nan"),
    ) -> bool:
        """Count one inner step, made by the caller; every H-th call exchanges.

        ``loss`` is the step's mean loss in nats per token. Returns True while training should go
        on; afterwards :attr:`reason` is completed, token_limit, stopped or left.
        """
        if self.done:
            return False
        now_s = self._clock.monotonic()
        step_s, self._step_started_s = now_s - self._step_started_s, now_s
        self._tokens_seen += tokens
        self._reporter.step(
            step=self.data_step,
            round=self.round,
            tokens=self._tokens_seen,
            loss=loss,
            lr=self._optimizer.param_groups[0]["lr"] if lr is None else lr,
            grad_norm=grad_norm,
            step_s=step_s,
        )
        self._tokens += tokens
        self._steps += 1
        self._steps_in_round += 1
        self._compute_s += step_s
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss))
        self._lease.update(step=self.data_step, tokens=self._tokens_seen)
        try:
            self._check()
            if self._steps_in_round >= self.settings.sync_every:
                self._synchronise()
        except Leaving as reason:
            self._end(str(reason))
        return not self.done

    # -- joining ---------------------------------------------------------------------------------

    def _start(self) -> None:
        self._reporter.start()
        self._lease.start()
        try:
            self._state("syncing")
            log.info(
                "%s joins %s: %d parameters, model %s",
                self.identity, self.document.run_id, self._layout.numel, self._layout.model_hash,
            )  # fmt: skip
            first_state(
                self._store, self.identity, self._layout, self._outer, self._clock, self._check
            )
            self._reload(at_least=0)
            self._catch_up()
            if self._last_commit is None:
                self._wait_for_everybody()
            self._begin_round()
        except Leaving as reason:
            self._end(str(reason))
        except BaseException as error:
            self._close(error)
            raise

    def _reload(self, *, at_least: int) -> None:
        """Take the global state of the newest checkpoint, of round ``at_least`` or later."""
        state = newest_state(
            self._store, self._layout, self._outer, at_least, self._clock, self._check
        )
        self._set_global(state.weights, state.round, rebase=False)
        self._totals = state.totals
        self.round = state.round + 1

    def _catch_up(self) -> None:
        """Apply every commit there is from :attr:`round` on."""
        while (commit := self._exchange.commit_of(self.round)) is not None:
            self._state("syncing")
            try:
                merged = self._exchange.replay(commit)
            except CannotReduce as error:
                log.warning(
                    "round %d cannot be replayed (%s): taking a checkpoint", commit.round, error
                )
                self._lease.update(round=commit.round + self.settings.checkpoint_every)
                self._reload(at_least=commit.round)
                self._reset_work()
                continue
            self._apply(commit, merged)

    def _wait_for_everybody(self) -> None:
        """Before round 1: wait for all target replicas, at most ``start_wait_s``."""
        give_up_s = self._clock.monotonic() + self.settings.start_wait_s
        while self._clock.monotonic() < give_up_s:
            self._observer.look()
            live = len(self._observer.live() | {self.identity.replica})
            if live >= self.settings.num_replicas:
                return
            if self._store.list(keys.contributions(1)):
                return
            self._lease.update(message=f"{live} of {self.settings.num_replicas} replicas are here")
            self._check()
            self._clock.sleep(0.25)
        log.warning("started without all replicas: waited %g s", self.settings.start_wait_s)

    # -- one round -------------------------------------------------------------------------------

    def _begin_round(self) -> None:
        self._steps_in_round = 0
        self._round_started_wall_s = self._clock.wall()
        self._step_started_s = self._clock.monotonic()
        self._exchange.forget_before(self.round)
        self._state("computing")

    def _synchronise(self) -> None:
        """Exchange with the group, then begin the next round."""
        timings = Timings(self._clock, {"compute": self._compute_in_round()})
        before = (self._metered.usage.requests, self._metered.usage.bytes_up,
                  self._metered.usage.bytes_down)  # fmt: skip
        if self._exchange.commit_of(self.round) is not None:
            log.warning("round %d was committed without this replica: it was late", self.round)
            self._late(timings, before)
            return
        self._state("uploading")
        gradient = self._global.sub(self._layout.read())
        if not bool(torch.isfinite(gradient).all()):
            self._discard_local()
            return
        sent = self._exchange.contribute(
            self.round,
            base=self._base,
            gradient=gradient,
            work=LocalWork(
                tokens=self._tokens,
                steps=self._steps,
                loss=float(torch.stack([x.float().cpu() for x in self._losses]).mean()),
                compute_s=self._compute_s,
            ),
            timings=timings,
        )
        del gradient
        self._state("waiting")
        try:
            settled = self._exchange.settle(
                self.round, base=self._base, totals=self._totals, sent=sent, timings=timings
            )
        except CannotReduce as error:
            log.error("round %d is committed but cannot be read here: %s", self.round, error)
            self._late(timings, before)
            return
        self._state("applying")
        start_s = self._clock.monotonic()
        included = self._apply(settled.commit, settled.merged)
        timings.add("apply", self._clock.monotonic() - start_s)
        outcome = "void" if settled.merged is None else "included" if included else "late"
        self._report(settled, outcome, timings, before, norm=sent.record.norm)
        if settled.refusal:
            log.error("this replica's contribution was refused: %s", settled.refusal)
            self._reload(at_least=0)
            self._catch_up()
            self._reset_work()
        self._after_commit(settled.commit)

    def _late(self, timings: Timings, before: tuple[int, int, int]) -> None:
        """Rebase on what was committed without this replica, and go on."""
        commit = self._exchange.commit_of(self.round)
        assert commit is not None
        self._catch_up()
        self._report(
            Settled(commit=commit, merged=None), "late", timings, before, norm=float("nan")
        )
        if self._last_commit is not None:
            self._after_commit(self._last_commit)

    def _apply(self, commit: Commit, merged: Merged | None) -> bool:
        """Take the outer step of a commit; True if this replica's work is in it."""
        included = self.identity in commit.contributors and merged is not None
        self._update_norm = 0.0
        if merged is not None:
            weights = self._global.clone()
            self._update_norm = self._outer.step(weights, merged.vector)
            if included:
                self._reset_work()
            self._set_global(weights, commit.round, rebase=not included and self._steps > 0)
        self._totals = Totals(committed=commit.committed_total, tokens=commit.tokens_total)
        if commit.void:
            log.error("round %d is void: %s", commit.round, commit.void)
        self._last_commit = commit
        self.round = commit.round + 1
        return included

    def _set_global(self, weights: Tensor, round: int, *, rebase: bool) -> None:
        """New global weights, which the model takes; with ``rebase`` its local progress on top."""
        local = weights.add(self._layout.read().sub_(self._global)) if rebase else weights
        self._global = weights
        self._base = Base(round=round, digest=digest(weights))
        self._layout.write(local)

    def _discard_local(self) -> None:
        """Non-finite local weights: nothing of them may reach the group."""
        log.error("round %d: non-finite weights; local work of %d steps is discarded and the "
                  "inner optimizer reset", self.round, self._steps)  # fmt: skip
        self._layout.write(self._global)
        self._optimizer.state.clear()
        self._reset_work()
        self._begin_round()
        self._lease.update(round=self.round + 1)  # nobody need wait for this replica

    def _after_commit(self, commit: Commit) -> None:
        """What whoever's turn it is does beside training; then the next round or the end."""
        order = [identity.replica for identity in commit.contributors]
        mine = order.index(self.identity.replica) if self.identity in commit.contributors else -1
        turn = commit.committed_total % len(order)
        every = self.settings.eval_every
        if not commit.void and mine >= 0:
            if every and (commit.last or commit.committed_total % every == 0) and mine == turn:
                self._evaluate_global(commit)
            due = commit.last or commit.committed_total % self.settings.checkpoint_every == 0
            if due and mine == (turn + 1) % len(order):
                self._checkpoint(commit.round)
        if commit.last:
            limit = self.settings.max_tokens
            full = commit.committed_total >= self.settings.total_rounds
            self._end("completed" if full or not limit else "token_limit")
        else:
            self._begin_round()

    def _evaluate_global(self, commit: Commit) -> None:
        if self._evaluate is None:
            return
        loss, tokens = self._evaluate()
        log.info("evaluation after round %d: loss %.4f nats per token", commit.round, loss)
        self._last_evaluation = Evaluation(
            round=commit.round, loss=loss, tokens=tokens, wall_s=self._clock.wall()
        )
        self._reporter.evaluation(self._last_evaluation)

    def _checkpoint(self, round: int) -> None:
        manifest = save_checkpoint(
            self._store,
            self.identity,
            self._layout,
            round=round,
            weights=self._global,
            outer=self._outer,
            totals=self._totals,
            wall_s=self._clock.wall(),
        )
        if manifest is not None:
            log.info("checkpoint of round %d is complete", round)
            sweep(self._store)

    # -- ending ----------------------------------------------------------------------------------

    def _end(self, reason: str) -> None:
        """Training is over for this replica; see that the result is published."""
        self.done = True
        self.reason = reason
        log.info("training ends: %s, %d rounds committed", reason, self._totals.committed)
        if reason != "left" and self._global.numel():
            self._finish()

    def _finish(self) -> None:
        """Publish the final weights when it is this replica's turn and nobody else has."""
        self._state("uploading")
        order = [i.replica for i in self._last_commit.contributors] if self._last_commit else []
        me = self.identity.replica
        first = self._totals.committed % len(order) if order else 0
        turn = (order.index(me) - first) % len(order) if me in order else len(order) + me
        my_turn_s = self._clock.monotonic() + 2.0 * turn
        while read_final(self._store) is None:
            if self._clock.monotonic() >= my_turn_s:
                self._publish()
                return
            self._clock.sleep(0.1)

    def _publish(self) -> None:
        self._layout.write(self._global)
        evaluation = self._last_evaluation
        won = publish_final(
            self._store,
            self.identity,
            round=self._base.round,
            reason=self.reason,
            tensors=_state_tensors(self._model),
            weights_digest=self._base.digest,
            config=self._config,
            summary={
                "run_id": self.document.run_id,
                "name": self.document.name,
                "reason": self.reason,
                "committed_rounds": self._totals.committed,
                "tokens": self._totals.tokens,
                "train_loss": self._last_commit.loss if self._last_commit else None,
                "eval_loss": evaluation.loss if evaluation else None,
                "eval_round": evaluation.round if evaluation else None,
                "parameters": self._layout.numel,
                "group_fingerprint": self.document.fingerprint,
            },
            wall_s=self._clock.wall(),
        )
        if won:
            log.info("final weights of round %d are published", self._base.round)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and not self.done:
            self._end("left")
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        """Say how it ended in the lease and the telemetry, and stop the threads."""
        if error is not None:
            log.error("%s: %s", type(error).__name__, error, exc_info=None)
        state = "failed" if error else "left" if self.reason == "left" else "done"
        self._reporter.phase(state=state, round=self.round)
        for close in (self._reporter.end, lambda: self._lease.end(state, str(error or ""))):
            try:
                close()
            except StoreError as failure:
                log.error("could not say goodbye: %s", failure)

    # -- small things ----------------------------------------------------------------------------

    def _check(self) -> None:
        self._lease.check_fence()
        if self._lease.stop_requested:
            raise Leaving("stopped")
        if self._leave.is_set():
            raise Leaving("left")

    def _state(self, state: str) -> None:
        self._lease.update(state=state, round=self.round, step=self.data_step, message="")
        self._reporter.phase(state=state, round=self.round)

    def _reset_work(self) -> None:
        self._tokens = 0
        self._steps = 0
        self._steps_in_round = 0
        self._compute_s = 0.0
        self._compute_before_s = 0.0
        self._losses: list[Tensor] = []

    def _compute_in_round(self) -> float:
        """Compute seconds of this round alone; a late replica's work spans several."""
        spent_s = self._compute_s - self._compute_before_s
        self._compute_before_s = self._compute_s
        return spent_s

    def _report(
        self,
        settled: Settled,
        outcome: str,
        timings: Timings,
        before: tuple[int, int, int],
        *,
        norm: float,
    ) -> None:
        usage = self._metered.usage
        self._reporter.round(
            RoundReport(
                round=settled.commit.round,
                outcome=outcome,
                started_wall_s=self._round_started_wall_s,
                committed_wall_s=self._clock.wall(),
                phases=timings.seconds,
                requests=usage.requests - before[0],
                bytes_up=usage.bytes_up - before[1],
                bytes_down=usage.bytes_down - before[2],
                norm=norm,
                update_norm=self._update_norm,
                contributors=len(settled.commit.contributors),
                weights_digest=self._base.digest,
            )
        )
        log.info("round %d: %s, %d contributors", settled.commit.round, outcome,
                 len(settled.commit.contributors))  # fmt: skip


def _state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with each tied tensor once, under its first name."""
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if tensor.numel() and tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        tensors[name] = tensor
    return tensors


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
