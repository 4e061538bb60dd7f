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
outer optimizer and everything that goes through the store.
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from diloco.clock import Clock, SystemClock
from diloco.errors import Leaving, ReplicaError
from diloco.membership.graceful_shutdown import COMMIT_SHARE, Departure
from diloco.membership.lease import Lease, claim_incarnation, patiently
from diloco.model import named_parameters
from diloco.model.flat_parameters import Layout
from diloco.model.inner_state import Inner, Stateful
from diloco.protocol.settings import GroupSettings
from diloco.store.base import MeteredStore, Store, StoreError
from diloco.store.retry import RetryingStore
from diloco.telemetry.startup_timing import Startup
from diloco.telemetry.writer import Number, Reporter
from diloco.training.drain import part
from diloco.training.final_export import Result, finish
from diloco.training.initial_state import read_document
from diloco.training.post_round import Evaluate
from diloco.training.progress import OnRound
from diloco.training.round_loop import RoundLoop
from diloco.training.sample import Sampler

log = logging.getLogger(__name__)


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
        sample: Sampler | None,
        heartbeat_interval_s: float | None,
        telemetry_interval_s: float,
        stateful: Mapping[str, Stateful] | None,
        on_round: OnRound | None,
        departure: Departure | None,
        startup: Startup | None,
        clock: Clock | None,
    ) -> None:
        self._clock: Clock = clock or SystemClock()
        self._departure = departure or Departure(self._clock)
        self._startup = startup or Startup(began_s=self._clock.monotonic())
        rng = random.Random(secrets.randbits(64))
        metered = MeteredStore(store)
        self._store = RetryingStore(metered, clock=self._clock, rng=rng, deadline_s=60.0)
        self.document = patiently(
            lambda: read_document(self._store, clock=self._clock), clock=self._clock
        )
        self.settings: GroupSettings = self.document.settings
        settings = self.settings
        if not 0 <= replica < settings.max_replicas:
            raise ReplicaError(
                f"expected a replica number from 0 to {settings.max_replicas - 1}, found {replica}"
            )
        named_parameters.check_optimizer(model, inner_optimizer)
        named_parameters.warn_of_buffers(model)
        self._trained = frozenset(name for name, _ in named_parameters.trained(model))
        self._warned_of_tokens = False
        self._model = model
        self.inner_optimizer = inner_optimizer
        self._config = config
        self._sample = sample
        self.identity = patiently(
            lambda: claim_incarnation(self._store, replica, nonce=secrets.token_hex(4)),
            clock=self._clock,
        )
        device = next(model.parameters()).device
        # Background threads have a store of their own, so that a round's bytes are the round's.
        background = RetryingStore(
            store,
            clock=SystemClock(),
            rng=rng,
            deadline_s=10.0,
            permitted=self._store.permitted,
        )
        self._lease = Lease(
            background,
            self.identity,
            clock=self._clock,
            interval_s=heartbeat_interval_s or min(2.0, settings.heartbeat_timeout_s / 5),
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            device=_device_name(device),
            on_drain=lambda within_s, reason: self._departure.ask(within_s=within_s, reason=reason),
        )
        self._reporter = Reporter(
            background, self.identity, clock=self._clock, interval_s=telemetry_interval_s
        )
        self._loop = RoundLoop(
            self._store,
            metered,
            settings,
            layout=self._make_layout(model),
            inner=self._make_inner(inner_optimizer, stateful),
            evaluate=evaluate,
            lease=self._lease,
            reporter=self._reporter,
            clock=self._clock,
            check=self._check,
        )
        self._loop.chores.on_round = on_round
        self._tokens_seen = 0
        self.done = False
        self.reason = ""

    # -- what a training loop reads --------------------------------------------------------------

    @property
    def round(self) -> int:
        """The round this replica is working towards."""
        return self._loop.round

    @property
    def schedule_step(self) -> int:
        """Inner steps of the *run* so far: rounds committed or on their way x H / P + steps in this
        round, at most those of the whole run.

        Learning rates follow it, not the replica's own age, so that a late joiner does not warm up
        again.
        """
        return self._loop.schedule_step

    @property
    def data_step(self) -> int:
        """A step number that never repeats in the life of a replica number, for drawing data."""
        return self._loop.data_step

    def leave(self, *, within_s: float = 0.0, reason: str = "") -> None:
        """Ask this replica to leave, at the latest in ``within_s`` seconds, having handed in its
        work and saved its state as far as there is time
        (:mod:`diloco.membership.graceful_shutdown`); without time it saves its state at its next
        step. ``reason`` stands in its last beat. Safe in a signal handler."""
        self._departure.ask(within_s=within_s, reason=reason)

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
        step = self.data_step
        step_s = self._loop.work.count(tokens=tokens, loss=loss)
        if tokens == 0 and not self._warned_of_tokens:
            self._warned_of_tokens = True
            log.warning(
                "step %d counted tokens=0: a contribution without tokens weighs next to nothing "
                "beside others. Pass the tokens or samples of the batch",
                step,
            )
        if self._loop.work.steps_in_round == 1:
            named_parameters.check_trained(self._model, self._trained)
        self._tokens_seen += tokens
        self._reporter.step(
            step=step,
            round=self.round,
            tokens=self._tokens_trained,
            loss=loss,
            lr=self.inner_optimizer.param_groups[0]["lr"] if lr is None else lr,
            grad_norm=grad_norm,
            step_s=step_s,
        )
        self._lease.update(step=self.data_step, tokens=self._tokens_trained)
        self._leaving(self._exchange_if_due)
        return not self.done

    def _exchange_if_due(self) -> str:
        self._check()
        if reason := self._loop.step_made():
            return reason
        if self._departure.asked and self._loop.work.steps_in_round == 0:
            return "left"  # the round that it was in is over
        return ""

    # -- joining ---------------------------------------------------------------------------------

    def _start(self) -> None:
        self._reporter.start()
        try:
            log.info("%s joins run %s", self.identity, self.document.run_id)
            self._leaving(self._begin)
        except BaseException as error:
            self._close(error)
            raise

    def _begin(self) -> str:
        self._lease.start(check=self._check)
        reason = self._loop.start()
        self._departure.begun = not reason
        before = self._loop.chores.before_first
        began_s = self._clock.monotonic() - before.get("wait", 0.0)
        before.update(self._startup.until(began_s))
        return reason

    def _leaving(self, work: Callable[[], str]) -> None:
        """Do ``work``; end if it says why, or was told to leave."""
        try:
            reason = work()
        except Leaving as leaving:
            reason = str(leaving)
        if reason:
            self._end(reason)

    # -- ending ----------------------------------------------------------------------------------

    def _end(self, reason: str) -> None:
        """Training is over for this replica; see that the result is published."""
        if reason == "left" and self._departure.asked:
            reason = part(self._loop, self._departure)
        self.done = True
        self.reason = reason
        state = self._loop.state
        log.info("training ends: %s, %d rounds committed", reason, state.totals.committed)
        if reason in ("left", "stopped") and state.weights is not None:
            self._loop.save()
        self._loop.close()
        if reason == "left" or state.weights is None:
            return
        self._loop.say("uploading")
        state.discard_local()
        result = Result(
            document=self.document,
            tensors=self._final_tensors,
            config=self._config,
            sample=self._sample,
            reason=reason,
            base=state.whole,
            totals=state.totals,
            parameters=state.layout.numel,
            last_commit=state.last_commit,
            last_evaluation=self._loop.chores.last_evaluation,
        )
        # The manifest ends the run: what led to it is told first, and nobody waits for a sample.
        with contextlib.suppress(StoreError):
            self._reporter.flush()
        finish(
            self._store,
            self.identity,
            result,
            self._clock,
            may_create=self._loop.may_create,
            gave_up=lambda: self._departure.is_over(COMMIT_SHARE) or self._lease.fenced,
        )

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
        message = str(error or (self._departure.reason if state == "left" else ""))
        self._loop.close()
        self._reporter.phase(state=state, round=self.round)
        if state == "done":
            self._lease.update(round=self._loop.state.round - 1)
        for close in (self._reporter.end, lambda: self._lease.end(state, message)):
            try:
                close()
            except StoreError as failure:
                log.error("could not say goodbye: %s", failure)

    @property
    def _tokens_trained(self) -> int:
        """By this replica number, earlier processes of it included."""
        return self._loop.chores.tokens_before + self._tokens_seen

    # -- what is shared where a replica has many ranks (diloco.ranks.group)
    # -----------------------------

    def _make_layout(self, model: nn.Module) -> Layout:
        settings = self.settings
        return Layout(model, fragments=settings.num_fragments, pattern=settings.fragment_pattern)

    def _make_inner(
        self, optimizer: torch.optim.Optimizer, stateful: Mapping[str, Stateful] | None
    ) -> Inner:
        return Inner(optimizer, stateful)

    def _final_tensors(self) -> dict[str, Tensor]:
        return dict(named_parameters.state(self._model))

    # -- small things ----------------------------------------------------------------------------

    def _check(self) -> None:
        self._lease.check_fence()
        if self._lease.stop_requested:
            raise Leaving("stopped")
        if self._departure.is_over():
            raise Leaving("left")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
