"""A member of a group: the round loop behind :meth:`Group.step`.

::

    group.json ─► join: claim incarnation, lease, checkpoint 0 or newest + log replay
                   │
        ┌──► H inner steps, the caller's own loop ──► group.step(...)
        │          │ every H-th call
        │    base - local ─► contribute ─► settle (plan, reduce, commit) ─► outer step
        └──────────┴── local := global (included) or global + what is kept (late)

    last commit ─► final weights, config, summary

The caller owns model, data and inner optimizer. The group owns the global weights (fp32, CPU), the
outer optimizer and all access to the store.
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import wait
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from diloco.clock import Clock, SystemClock
from diloco.errors import StopReason, StopTraining
from diloco.membership.free_number import claim_process
from diloco.membership.graceful_shutdown import COMMIT_SHARE, GracefulShutdown
from diloco.membership.lease import Lease, patiently
from diloco.membership.observer import Observer
from diloco.model import named_parameters
from diloco.model.buffers import BufferCheck
from diloco.model.flat_parameters import Layout
from diloco.model.inner_state import Inner, Stateful
from diloco.protocol.control_pace import default_interval_s
from diloco.protocol.settings import GroupSettings
from diloco.store.base import Store, StoreError
from diloco.store.daemon import call_in_daemon
from diloco.store.metered import MeteredStore
from diloco.store.retry import RetryingStore
from diloco.telemetry.startup_timing import Startup
from diloco.telemetry.writer import Number, TelemetryWriter
from diloco.training.context import ReplicaContext
from diloco.training.drain import drain
from diloco.training.final_export import Result, export_final
from diloco.training.final_result import PutFinal
from diloco.training.hooks import BeforeRound, RoundWatcher
from diloco.training.initial_state import read_document
from diloco.training.join_options import JoinOptions, layout_options
from diloco.training.local_progress import LocalProgress
from diloco.training.progress import OnRound, ignore_status
from diloco.training.round_loop import RoundLoop

log = logging.getLogger(__name__)
T = TypeVar("T")

END_S = 20.0
"""For how long the last segment of telemetry, and then the last heartbeat, is awaited: longer than
it is tried again."""


class Group:
    """A member of a running group. Created by :func:`diloco.join`."""

    def __init__(self, store: Store, options: JoinOptions) -> None:
        self._clock: Clock = options.clock or SystemClock()
        clock = self._clock
        self._options = options
        self._shutdown = options.graceful_shutdown or GracefulShutdown(clock)
        self._startup = options.startup or Startup(began_s=clock.monotonic())
        rng = random.Random(secrets.randbits(64))
        metered = MeteredStore(store)
        self._store = RetryingStore(metered, clock=clock, rng=rng, deadline_s=60.0)
        self.document = patiently(lambda: read_document(self._store, clock=clock), clock=clock)
        self.settings: GroupSettings = self.document.settings
        settings, model = self.settings, options.model
        named_parameters.check_optimizers(model, options.inner_optimizers)
        self._buffers = BufferCheck(
            model, options.buffers, codec=settings.codec, mean_codec=settings.mean_codec
        )
        self._trained = frozenset(name for name, _ in named_parameters.trained(model))
        self._warned_of_tokens = False
        self._model = model
        self.inner_optimizers = options.inner_optimizers
        self.identity = patiently(
            lambda: claim_process(
                self._store, settings, options.replica, clock=clock, report=options.on_status
            ),
            clock=clock,
        )
        # Background threads use another store, so that metered bytes are those of the rounds.
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
            clock=clock,
            interval_s=options.heartbeat_interval_s
            or default_interval_s(settings.heartbeat_timeout_s),
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            device=_device_name(next(model.parameters()).device),
            on_drain=lambda within_s, reason: self._shutdown.request(
                within_s=within_s, reason=reason
            ),
        )
        self._lease.on_message = options.on_status
        self._telemetry = TelemetryWriter(
            background,
            self.identity,
            clock=clock,
            interval_s=options.telemetry_interval_s,
            packs_kept=settings.telemetry_packs,
        )
        self._context = ReplicaContext(
            store=self._store,
            metered=metered,
            settings=settings,
            lease=self._lease,
            telemetry=self._telemetry,
            clock=clock,
            check=self._check,
        )
        progress = self._make_progress(model)
        inner = self._make_inner(options.stateful)
        self._loop = RoundLoop(
            self._with_team(self._context, progress, inner),
            progress,
            inner=inner,
            evaluate=options.evaluate,
        )
        self._loop.tasks.on_round = options.on_round
        self._tokens_seen = 0
        self.done = False
        self.reason = ""

    # -- for the training loop -------------------------------------------------------------------

    @property
    def replica(self) -> int:
        """The number of this replica in the run, e.g. for choosing its part of the data."""
        return self.identity.replica

    @property
    def round(self) -> int:
        """The round of the current inner steps."""
        return self._loop.round

    @property
    def schedule_step(self) -> int:
        """Inner steps of the *run* so far: rounds committed or in flight x H / P + steps in this
        round, at most the steps of the whole run.

        Learning rates are functions of it, not of the steps of this process, so that a replica that
        joins late does not warm up again.
        """
        return self._loop.schedule_step

    @property
    def data_step(self) -> int:
        """The step number for drawing data; it never repeats in the life of a replica number."""
        return self._loop.data_step

    def leave(self, *, within_s: float = 0.0, reason: str = "") -> None:
        """Request a graceful shutdown within ``within_s`` seconds. Safe in a signal handler.

        The replica contributes its work and saves its state as far as the time allows
        (:mod:`diloco.membership.graceful_shutdown`); with 0 s it only saves its state, at its next
        step. ``reason`` is shown in the last heartbeat.
        """
        self._shutdown.request(within_s=within_s, reason=reason)

    def checkpoint(self) -> None:
        """Request a checkpoint of the global weights at the next round boundary.

        After the next commit that is not void this replica writes it in the background, beside
        those of the setting ``checkpoint_every``; the next outer step waits for it. Call it on one
        replica: each replica that calls it uploads one, and the first complete one is kept.
        On a store without conditional writes only the coordinator writes, so the request waits
        until this replica is the coordinator. Older checkpoints are deleted as usual, except the
        newest two.
        """
        self._loop.tasks.checkpoint_requested = True

    def evaluate(self, evaluation: Callable[[], T]) -> T:
        """Call ``evaluation`` with the global weights in the model; return its result.

        Call it between two steps. The weights are those of the newest round that this replica has
        applied. Afterwards, also after an exception, the local weights are restored bit by bit; a
        copy of them is in host memory meanwhile. The optimizer is not touched, nor are buffers that
        the group does not average: switch the model to ``eval()`` in the function.

        In a replica of several ranks, all ranks call this method together.
        """
        if self.done:
            return evaluation()  # the model has the final global weights
        with self._loop.state.layout.restored():
            self._write_global()
            return evaluation()

    def register_round_hook(
        self, *, before: BeforeRound | None = None, after: OnRound | None = None
    ) -> RemovableHandle:
        """Register functions to call around the exchange of each round, in :meth:`step`.

        Args:
            before: called with the round's number when its inner steps are complete, before the
                pseudo-gradient is computed; the model has the local weights, and changes to them
                are contributed. Not called for what a leaving replica contributes early.
            after: called with the :class:`~diloco.training.progress.RoundProgress` of a round once
                it is applied; the model has the new weights. With overlap, inner steps have been
                made since. Not called for rounds that a joining replica replays.

        Returns a handle whose ``remove()`` removes both. An exception in a hook propagates from
        :meth:`step` and ends this process's part in the group: no further hook is called, and each
        later step raises :class:`~diloco.errors.ReplicaError`.

        In a replica of several ranks all ranks register the same hooks, which run on all of them
        and can therefore use collective operations.
        """
        return self._loop.tasks.hooks.register(before=before, after=after)

    def watch(self, watcher: RoundWatcher) -> None:
        """Let ``watcher`` follow the contributions of this replica from now on, instead of the
        watcher before. Its exceptions propagate from :meth:`step`."""
        self._loop.tasks.watcher = watcher
        self._loop.progress.on_discard = watcher.discarded

    @property
    def store(self) -> Store:
        """The store of the group, with retries."""
        return self._store

    @property
    def clock(self) -> Clock:
        return self._clock

    def observer(self) -> Observer:
        """Return a new observer of the leases of the group's processes."""
        return Observer(
            self._store,
            clock=self._clock,
            timeout_s=self.settings.heartbeat_timeout_s,
            gaps=lambda: self._lease.gaps,
        )

    def step(
        self,
        *,
        tokens: int,
        loss: Number,
        lr: float | None = None,
        grad_norm: Number = float("nan"),
    ) -> bool:
        """Count an inner step of the caller; every H-th call exchanges a round.

        Args:
            tokens: tokens of the step's batch, 0 or more. The first 0 is a :class:`UserWarning`.
            loss: the step's mean loss in nats per token, a float or a tensor of one element.
            lr: learning rate of the step, by default that of the first optimizer's first
                parameter group.
            grad_norm: norm of the gradient, for telemetry.

        Raises :class:`ValueError` for a loss or norm of several elements, and in the first step of
        a round if ``requires_grad`` of a parameter has changed since the join, or a buffer that
        :func:`diloco.join` has no choice for.

        Returns True to continue. False ends training; then :attr:`reason` is a
        :class:`~diloco.errors.StopReason`: completed, token_limit, stopped or left.
        """
        if self.done:
            return False
        self._loop.tasks.hooks.check()
        loss, grad_norm = _of_one_element("loss", loss), _of_one_element("grad_norm", grad_norm)
        step = self.data_step
        step_s = self._loop.counter.count(tokens=tokens, loss=loss)
        if tokens == 0 and not self._warned_of_tokens:
            self._warned_of_tokens = True
            warnings.warn(
                f"step {step} has tokens=0: a contribution without tokens has almost no weight in "
                "the mean. Pass the tokens or samples of the batch",
                stacklevel=2,
            )
        if self._loop.counter.steps_in_round == 1:
            named_parameters.check_trained(self._model, self._trained)
            self._buffers.check()
        self._tokens_seen += tokens
        self._telemetry.step(
            step=step,
            round=self.round,
            tokens=self._tokens_trained,
            loss=loss,
            lr=self.inner_optimizers[0].param_groups[0]["lr"] if lr is None else lr,
            grad_norm=grad_norm,
            step_s=step_s,
        )
        self._lease.update(step=self.data_step, tokens=self._tokens_trained)
        self._run_until_stop(self._exchange_if_due)
        return not self.done

    def _exchange_if_due(self) -> StopReason | None:
        self._check()
        if reason := self._loop.step_made():
            return reason
        if self._shutdown.is_requested and self._loop.counter.steps_in_round == 0:
            return StopReason.LEFT  # between two rounds
        return None

    # -- joining ---------------------------------------------------------------------------------

    def _start(self) -> None:
        self._telemetry.start()
        try:
            log.info("%s joins run %s", self.identity, self.document.run_id)
            self._options.on_status(f"replica {self.replica} joins run {self.document.run_id}")
            self._run_until_stop(self._begin)
            if self.done and self.reason != StopReason.LEFT:
                self._options.on_status(
                    f"the run has ended ({self.reason}, {self._loop.state.totals.committed} rounds "
                    "committed): enter another URI for a new run"
                )
            self._lease.on_message = ignore_status  # the waits inside rounds are short
        except BaseException as error:
            self._close(error)
            raise

    def _begin(self) -> StopReason | None:
        self._lease.start(check=self._check)
        reason = self._loop.start()
        self._shutdown.begun = reason is None
        before = self._loop.tasks.before_first
        began_s = self._clock.monotonic() - before.get("wait", 0.0)
        before.update(self._startup.until(began_s))
        return reason

    def _run_until_stop(self, action: Callable[[], StopReason | None]) -> None:
        """Call ``action``; end training if it returns or raises a reason to stop."""
        try:
            reason = action()
        except StopTraining as stop:
            reason = stop.reason
        if reason:
            self._end(reason)

    # -- ending ----------------------------------------------------------------------------------

    def _end(self, reason: StopReason) -> None:
        """End training; publish the result if the run has ended."""
        if reason == StopReason.LEFT and self._shutdown.is_requested:
            reason = drain(self._loop, self._shutdown)
        self.done = True
        self.reason = reason
        state = self._loop.state
        log.info("training ends: %s, %d rounds committed", reason, state.totals.committed)
        if reason in (StopReason.LEFT, StopReason.STOPPED) and state.weights is not None:
            self._loop.save(self._shutdown.is_over)
        self._loop.close(self._shutdown.is_over)
        if reason == StopReason.LEFT or state.weights is None:
            return
        self._loop.set_state("uploading")
        state.discard_local()
        result = Result(
            document=self.document,
            tensors=self._final_tensors,
            config=self._options.config,
            sample=self._options.sample,
            reason=reason,
            base=state.whole,
            totals=state.totals,
            parameters=state.layout.numel,
            last_commit=state.last_commit,
            last_evaluation=self._loop.tasks.last_evaluation,
            put=self._put_final,
        )
        # The final manifest ends the run, so telemetry is written before it, and samples after it.
        with contextlib.suppress(StoreError):
            self._telemetry.flush()
        export_final(
            self._store,
            self.identity,
            result,
            self._clock,
            can_create=self._context.can_create,
            gave_up=lambda: self._shutdown.is_over(COMMIT_SHARE) or self._lease.fenced,
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
            self._end(StopReason.LEFT)
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        """Stop the threads; the last heartbeat and telemetry segment show how training ended."""
        if error is not None:
            log.error("%s: %s", type(error).__name__, error, exc_info=None)
        state = "failed" if error else "left" if self.reason == StopReason.LEFT else "done"
        message = str(error or (self._shutdown.reason if state == "left" else ""))
        self._loop.close(lambda: True)
        self._telemetry.phase(state=state, round=self.round)
        if state == "done":
            self._lease.update(round=self._loop.state.round - 1)
        for close in (self._telemetry.end, lambda: self._lease.end(state, message)):
            ending = call_in_daemon(close, name="end")
            if not wait([ending], timeout=END_S).done:
                log.error("could not write the end of this process: a request of the store hangs")
                continue
            try:
                ending.result()
            except StoreError as failure:
                log.error("could not write the end of this process: %s", failure)

    @property
    def _tokens_trained(self) -> int:
        """Tokens trained by this replica number, including earlier processes."""
        return self._loop.tasks.tokens_before + self._tokens_seen

    # -- overridden for a replica of several ranks (diloco.ranks.group) ---------------------------

    def _make_progress(self, model: nn.Module) -> LocalProgress:
        layout = Layout(model, **layout_options(self.settings, self._options))
        return LocalProgress(self.identity, self.settings, layout, self._clock)

    def _with_team(
        self, context: ReplicaContext, progress: LocalProgress, inner: Inner
    ) -> ReplicaContext:
        return context

    def _make_inner(self, stateful: Mapping[str, Stateful] | None) -> Inner:
        return Inner(self.inner_optimizers, stateful)

    def _write_global(self) -> None:
        """Write the global weights to the model of every rank."""
        self._loop.state.discard_local()

    _put_final: PutFinal | None = None

    def _final_tensors(self) -> dict[str, Tensor]:
        return self._published(named_parameters.state(self._model))

    def _published(self, state: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return the final weights of the model's ``state``, all of which is consumed."""
        if self._options.publish == "model":
            return dict(state)
        exchanged = {slot.name for slot in self._loop.state.layout.tensors}
        return {name: tensor for name, tensor in state if name in exchanged}

    def _check(self) -> None:
        self._lease.check_fence()
        if self._lease.stop_requested:
            raise StopTraining(StopReason.STOPPED)
        if self._shutdown.is_over():
            raise StopTraining(StopReason.LEFT)


def _of_one_element(name: str, number: Number) -> Number:
    """Return a loss or norm as a number or a plain tensor; FSDP2's are sharded, also on a single
    rank. Raises :class:`ValueError` for several elements."""
    if not isinstance(number, Tensor):
        return number
    if number.numel() != 1:
        raise ValueError(
            f"{name}: expected a number or a tensor of one element, found one of the shape "
            f"{tuple(number.shape)}"
        )
    return named_parameters.read(number)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
