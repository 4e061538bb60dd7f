"""The end of a run: one member publishes the final weights, the others see that it does."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from diloco.clock import Clock
from diloco.exchange.round_observer import Base
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.reading import Damaged
from diloco.protocol.records import Commit, Identity
from diloco.protocol.round_view import Totals
from diloco.protocol.telemetry import Evaluation
from diloco.store.base import Store, StoreError
from diloco.training.checkpoint import publish_final, read_final, sweep, sweep_results
from diloco.training.sample import Sampler, publish_sample

log = logging.getLogger(__name__)

TURN_S = 15.0
"""Pause between the turns of two replicas to publish; the first may have to evaluate before."""
STOPPED_TURN_S = 3.0
"""The same after a stop: nobody evaluates, and whoever stopped the run waits."""
POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Result:
    """The run as this replica knows it at the end. ``tensors`` gives the global weights, which the
    model has whose ``sample`` is drawn."""

    document: GroupDocument
    tensors: Callable[[], dict[str, Tensor]]
    config: Mapping[str, Any]
    sample: Sampler | None
    reason: str
    base: Base
    totals: Totals
    parameters: int
    last_commit: Commit | None
    last_evaluation: Evaluation | None

    @property
    def summary(self) -> dict[str, Any]:
        commit, evaluation = self.last_commit, self.last_evaluation
        return {
            "run_id": self.document.run_id,
            "name": self.document.name,
            "reason": self.reason,
            "committed_rounds": self.totals.committed,
            "tokens": self.totals.tokens,
            "train_loss": commit.loss if commit else None,
            "eval_loss": evaluation.loss if evaluation else None,
            "eval_round": evaluation.round if evaluation else None,
            "parameters": self.parameters,
            "group_fingerprint": self.document.fingerprint,
        }


def finish(
    store: Store,
    identity: Identity,
    result: Result,
    clock: Clock,
    *,
    may_create: Callable[[], bool] = lambda: True,
    gave_up: Callable[[], bool] = lambda: False,
) -> None:
    """Return when the final manifest is there, having written it, and a sample after it, if nobody
    else did in time; or when this replica has been told to leave (``gave_up``)."""
    try:
        _publish(store, identity, result, clock, may_create=may_create, gave_up=gave_up)
        final = read_final(store)
        if final is not None and may_create():
            with contextlib.suppress(StoreError):
                sweep_results(store, final)
    except Damaged as error:
        log.error("the run is over, but its result cannot be read: %s", error)


def _publish(
    store: Store,
    identity: Identity,
    result: Result,
    clock: Clock,
    *,
    may_create: Callable[[], bool],
    gave_up: Callable[[], bool],
) -> None:
    pause_s = STOPPED_TURN_S if result.reason == "stopped" else TURN_S
    my_turn_s = clock.monotonic() + pause_s * _turn(identity, result)
    while read_final(store) is None and not gave_up():
        if clock.monotonic() < my_turn_s or not may_create():
            clock.sleep(POLL_S)
            continue
        # Before the manifest ends the run, for whoever dies here is followed by the next in turn.
        with contextlib.suppress(StoreError):
            sweep(store, at_the_end=True)
        won = publish_final(
            store,
            identity,
            round=result.base.round,
            reason=result.reason,
            tensors=result.tensors(),
            weights_digest=result.base.digest,
            config=result.config,
            summary=result.summary,
            wall_s=clock.wall(),
        )
        if won:
            log.info("final weights of round %d are published", result.base.round)
            if result.sample is not None:
                publish_sample(
                    store, identity, result.sample,
                    round=result.base.round, clock=clock, gave_up=gave_up,
                )  # fmt: skip


def evaluator(commit: Commit) -> Identity:
    """Who evaluates after a commit; it rotates. After the last one it also publishes first."""
    return commit.contributors[commit.committed_total % len(commit.contributors)]


def checkpointer(commit: Commit) -> Identity:
    """Who writes the checkpoint after a commit: the one after the evaluator."""
    return commit.contributors[(commit.committed_total + 1) % len(commit.contributors)]


def _turn(identity: Identity, result: Result) -> int:
    if result.last_commit is None:
        return identity.replica
    order = [member.replica for member in result.last_commit.contributors]
    if identity.replica not in order:
        return len(order) + identity.replica
    first = order.index(evaluator(result.last_commit).replica)
    return (order.index(identity.replica) - first) % len(order)
