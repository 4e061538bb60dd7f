"""Join a group: :func:`join` returns a :class:`Group`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed, nn

from diloco.clock import Clock
from diloco.membership.graceful_shutdown import Departure
from diloco.model.inner_state import Stateful
from diloco.store.base import Store
from diloco.store.open import open_store
from diloco.store.uris import check_rendezvous
from diloco.telemetry.startup_timing import Startup
from diloco.training.group import Group
from diloco.training.post_round import Evaluate
from diloco.training.progress import OnRound, on_round_of
from diloco.training.sample import Sampler

__all__ = ["Group", "join"]


def join(
    uri: str,
    *,
    model: nn.Module,
    inner_optimizer: torch.optim.Optimizer,
    replica: int | None = None,
    evaluate: Evaluate | None = None,
    config: Mapping[str, Any] | None = None,
    sample: Sampler | None = None,
    heartbeat_interval_s: float | None = None,
    telemetry_interval_s: float = 2.0,
    stateful: Mapping[str, Stateful] | None = None,
    progress: bool | OnRound = False,
    departure: Departure | None = None,
    startup: Startup | None = None,
    store: Store | None = None,
    clock: Clock | None = None,
) -> Group:
    """Take part in the group whose rendezvous is ``uri``; use the result as a context manager.

    Where ``torch.distributed`` has been initialised with more than one rank (torchrun), these ranks
    are one replica: all of them call this at once, and all of them step
    (:mod:`diloco.ranks.group`).

    ``replica`` is the identity in the run, by default the environment's ``REPLICA_RANK``.
    ``evaluate`` is called with the global weights in the model, on the replica whose turn it is.
    ``config`` goes beside the final weights, and so does what ``sample`` says of them, on the
    replica that publishes them. ``stateful`` (data loader, scheduler, ...) is saved with the inner
    optimizer and restored when the same replica number is launched again. ``progress`` True prints
    a line after each round; a function is called with a
    :class:`~diloco.training.progress.RoundProgress`. ``departure`` is for whoever may ask it to
    leave while this call has not returned yet; afterwards there is :meth:`Group.leave`. ``startup``
    is to be reported as what went before. On return the model holds the group's global weights.

    Raises :class:`~diloco.errors.ReplicaError` (no such group, another model),
    :class:`~diloco.protocol.group_document.ProtocolMismatch`,
    :class:`~diloco.protocol.settings.SettingsError` or
    :class:`~diloco.store.base.StoreError`.
    """
    if store is None:
        check_rendezvous(uri, relative=True)
    if replica is None:
        replica = int(os.environ["REPLICA_RANK"])
    options: dict[str, Any] = {
        "replica": replica,
        "model": model,
        "inner_optimizer": inner_optimizer,
        "evaluate": evaluate,
        "config": config or {},
        "sample": sample,
        "heartbeat_interval_s": heartbeat_interval_s,
        "telemetry_interval_s": telemetry_interval_s,
        "stateful": stateful,
        "on_round": on_round_of(progress),
        "departure": departure,
        "startup": startup,
        "clock": clock,
    }
    if many_ranks():
        from diloco.ranks.group import join_ranks  # it imports this module, and more of torch

        return join_ranks(lambda: store or open_store(uri, sole_creator=True), **options)
    group = Group(store or open_store(uri, sole_creator=True), **options)
    group._start()
    return group


def many_ranks() -> bool:
    """Whether this process is one of several of its replica."""
    ready = distributed.is_available() and distributed.is_initialized()
    return ready and distributed.get_world_size() > 1
