"""The end of a run: one replica publishes the final weights; the others replace it if it fails."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from diloco.clock import Clock
from diloco.errors import StopReason
from diloco.exchange.round_observer import Base
from diloco.protocol import keys
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.reading import Damaged, read_record
from diloco.protocol.records import Commit, Identity
from diloco.protocol.round_view import Totals
from diloco.protocol.telemetry import Evaluation
from diloco.store.base import Store, StoreError
from diloco.training.final_result import PutFinal, publish_final, read_final, sweep_results
from diloco.training.sample import Sampler, publish_sample
from diloco.training.sweep import sweep

log = logging.getLogger(__name__)

TURN_S = 15.0
"""Seconds between the attempts of two replicas to publish; the first can be evaluating."""
STOPPED_TURN_S = 3.0
"""The same after a stop: there is no evaluation, and the operator waits."""
POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run. ``tensors`` returns the global weights, which are also in the model that
    ``sample`` uses; ``put`` stores them (:func:`~diloco.training.final_result.publish_final`)."""

    document: GroupDocument
    tensors: Callable[[], dict[str, Tensor]]
    config: Mapping[str, Any]
    sample: Sampler | None
    reason: StopReason
    base: Base
    totals: Totals
    parameters: int
    last_commit: Commit | None
    last_evaluation: Evaluation | None
    put: PutFinal | None = None

    @property
    def summary(self) -> dict[str, Any]:
        """The content of ``summary.json``."""
        commit, evaluation = self.last_commit, self.last_evaluation
        return {
            "run_id": self.document.run_id,
            "name": self.document.name,
            "reason": self.reason.value,
            "committed_rounds": self.totals.committed,
            "tokens": self.totals.tokens,
            "train_loss": commit.loss if commit else None,
            "eval_loss": evaluation.loss if evaluation else None,
            "eval_round": evaluation.round if evaluation else None,
            "parameters": self.parameters,
            "group_fingerprint": self.document.fingerprint,
        }


def export_final(
    store: Store,
    identity: Identity,
    result: Result,
    clock: Clock,
    *,
    can_create: Callable[[], bool] = lambda: True,
    gave_up: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until the final manifest exists; write it, and a sample after it, when this replica is
    scheduled to. Returns early if ``gave_up`` returns True."""
    try:
        _publish(store, identity, result, clock, can_create=can_create, gave_up=gave_up)
        final = read_final(store)
        if final is not None and can_create():
            with contextlib.suppress(StoreError):
                sweep_results(store, final)
    except Damaged as error:
        log.error("the run has ended, but its result cannot be read: %s", error)


def _publish(
    store: Store,
    identity: Identity,
    result: Result,
    clock: Clock,
    *,
    can_create: Callable[[], bool],
    gave_up: Callable[[], bool],
) -> None:
    pause_s = STOPPED_TURN_S if result.reason == StopReason.STOPPED else TURN_S
    start_s = clock.monotonic() + pause_s * _stagger_index(store, identity, result)
    while read_final(store) is None and not gave_up():
        if clock.monotonic() < start_s or not can_create():
            clock.sleep(POLL_S)
            continue
        # Before the manifest: if this process dies here, the next replica publishes and sweeps.
        with contextlib.suppress(StoreError):
            kept = result.document.settings.residual_rounds
            sweep(store, rounds_kept=kept, at_the_end=True)
        won = publish_final(
            store,
            identity,
            round=result.base.round,
            reason=result.reason.value,
            tensors=result.tensors(),
            weights_digest=result.base.digest,
            config=result.config,
            summary=result.summary,
            wall_s=clock.wall(),
            put=result.put,
        )
        if won:
            log.info("final weights of round %d are published", result.base.round)
            if result.sample is not None:
                publish_sample(
                    store,
                    identity,
                    result.sample,
                    round=result.base.round,
                    clock=clock,
                    gave_up=gave_up,
                )


def evaluator(commit: Commit) -> Identity:
    """Return the replica that evaluates after a commit (rotating). After the last commit it is also
    the first to publish."""
    return commit.contributors[commit.committed_total % len(commit.contributors)]


def checkpointer(commit: Commit) -> Identity:
    """Return the replica that writes the checkpoint after a commit: the one after the evaluator."""
    return commit.contributors[(commit.committed_total + 1) % len(commit.contributors)]


def _stagger_index(store: Store, identity: Identity, result: Result) -> int:
    """Return the position of this replica among those that publish.

    A replica that has not applied the newest committed round comes after all that have, so that a
    stop keeps every committed round.
    """
    if result.last_commit is None:
        return identity.replica
    order = [member.replica for member in result.last_commit.contributors]
    behind = len(order) if _is_committed(store, result.base.round + 1) else 0
    if identity.replica not in order:
        return behind + len(order) + identity.replica
    first = order.index(evaluator(result.last_commit).replica)
    return behind + (order.index(identity.replica) - first) % len(order)


def _is_committed(store: Store, round: int) -> bool:
    with contextlib.suppress(StoreError, Damaged):
        read_record(store, keys.commit(round), Commit)
        return True
    return False
