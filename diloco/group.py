"""Join a group: :func:`join` returns a :class:`~diloco.training.group.Group`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import distributed, nn

from diloco.clock import Clock, SystemClock
from diloco.error_lines import in_one_line
from diloco.membership.graceful_shutdown import GracefulShutdown
from diloco.model.buffers import Buffers
from diloco.model.inner_state import InnerOptimizers, Stateful, optimizers_of
from diloco.protocol.control_pace import TELEMETRY_INTERVAL_S
from diloco.protocol.settings import GroupSettings
from diloco.store.base import Store
from diloco.store.open import open_store
from diloco.store.uris import check_rendezvous
from diloco.telemetry.startup_timing import Startup
from diloco.training.create_or_join import create_or_check
from diloco.training.group import Group
from diloco.training.join_options import JoinOptions, Publish
from diloco.training.post_round import Evaluate
from diloco.training.progress import OnRound, callbacks_of
from diloco.training.sample import Sampler

__all__ = ["Group", "join"]


def join(
    uri: str,
    model: nn.Module,
    inner_optimizer: InnerOptimizers,
    *,
    replica: int | None = None,
    settings: GroupSettings | None = None,
    fresh: bool | str = False,
    buffers: Buffers | None = None,
    publish: Publish = "model",
    evaluate: Evaluate | None = None,
    config: Mapping[str, Any] | None = None,
    sample: Sampler | None = None,
    heartbeat_interval_s: float | None = None,
    telemetry_interval_s: float = TELEMETRY_INTERVAL_S,
    stateful: Mapping[str, Stateful] | None = None,
    progress: bool | OnRound = False,
    graceful_shutdown: GracefulShutdown | None = None,
    startup: Startup | None = None,
    store: Store | None = None,
    clock: Clock | None = None,
) -> Group:
    """Join the group at the rendezvous ``uri``, or create it; use the result as a context manager.

    If ``torch.distributed`` has been initialised with more than one rank (torchrun), these ranks
    form one replica: all of them call this function together, and all of them call
    :meth:`Group.step` (:mod:`diloco.ranks.group`).

    On return, the model holds the group's global weights.

    Args:
        uri: rendezvous URI of the group, e.g. ``s3://bucket/run``.
        model: the model to train. Its trainable parameters are the weights of the group.
        inner_optimizer: an optimizer over exactly these parameters, or several that divide them,
            e.g. ``[muon, adamw]``. Their states are saved for the next process of the replica.
        replica: number of this replica in the run, by default ``REPLICA_RANK``. Without either, a
            number is taken from the store: the lowest one whose process has ended or has been dead
            for the heartbeat timeout, whose saved state is resumed, else the lowest unused one.
            Give numbers to all replicas of a group or to none.
        settings: the settings of the group. If there is no group, it is created with them; else the
            group must have the same. All replicas can pass them at once: one of them creates the
            group. None joins an existing group, whatever its settings are.
        fresh: requires a new run, for which ``settings`` are needed; nothing is ever deleted. True:
            this call must create the group. A text is the name of the run, e.g. the number of a
            batch job: the call creates the group, or joins it if it was created under this name, so
            that all replicas of a run, also restarted ones, can pass it.
        buffers: persistent floating-point buffers that training changes, such as the running
            statistics of BatchNorm. "average": they become the average of the replicas in each
            round, as part of the weights; all replicas must enter it. "local": each replica keeps
            its own. None: the first step that changes one raises :class:`ValueError`.
        publish: the final weights that the group stores. "model": the whole state dict of the
            model. "exchanged": only what replicas exchange, i.e. trainable parameters and averaged
            buffers, e.g. the adapters of a frozen base model, which then never leaves the machine.
        evaluate: returns (mean loss in nats per token, tokens evaluated). Called with the global
            weights in the model, on the replica that is scheduled to evaluate.
        config: stored as ``config.json`` beside the final weights.
        sample: stored as a sample of the final weights, by the replica that publishes them.
        heartbeat_interval_s: seconds between heartbeats, less than half of the group's timeout; by
            default a fifth of it.
        telemetry_interval_s: seconds between uploads of telemetry; the first ones of a process
            are closer together.
        stateful: objects with ``state_dict`` and ``load_state_dict`` (data loader, scheduler, ...)
            that are saved with the inner optimizers and restored in the replica's next process.
        progress: True prints what the replica waits for and a line per round, or a bar on a
            terminal where tqdm is installed; a function is called with the
            :class:`~diloco.training.progress.RoundProgress` of each round.
        graceful_shutdown: lets a signal handler request a shutdown before this call returns; later,
            use :meth:`Group.leave`.
        startup: durations of the phases before this call, reported with the first round.
        store: the store of the group, instead of the one that ``uri`` names.
        clock: source of time, for tests.

    Raises:
        ReplicaError: the group does not exist, or the model differs from the group's
            (:class:`~diloco.errors.ModelMismatch`).
        SettingsMismatch: the group has other settings; the message names the first that differ.
        GroupExists: ``fresh`` is set, and the rendezvous has the group of another run.
        ValueError: an argument is invalid.
        ProtocolMismatch: the group uses a protocol version that is not supported.
        SettingsError: the group has invalid settings.
        StoreError: the store is unavailable or denies access.

    A program that does not handle such an error ends with its message as one line, and with the
    traceback if the program was started with ``-v``.
    """
    with in_one_line(uri):
        if store is None:
            check_rendezvous(uri, relative=True)
        if fresh and settings is None:
            raise ValueError("fresh: expected the settings of the new group, found none")
        on_round, on_status = callbacks_of(progress)
        options = JoinOptions(
            replica=replica_number(os.environ) if replica is None else replica,
            model=model,
            inner_optimizers=optimizers_of(inner_optimizer),
            buffers=buffers,
            publish=publish,
            evaluate=evaluate,
            config=config or {},
            sample=sample,
            heartbeat_interval_s=heartbeat_interval_s,
            telemetry_interval_s=telemetry_interval_s,
            stateful=stateful,
            on_round=on_round,
            on_status=on_status,
            graceful_shutdown=graceful_shutdown,
            startup=startup,
            clock=clock,
        )

        def opened_store() -> Store:
            return store or open_store(uri, coordinator=True)

        def open_group() -> Store:
            opened = opened_store()
            if settings is not None:
                create_or_check(opened, settings, fresh=fresh, clock=clock or SystemClock())
            return opened

        return _join(open_group, options, opened_store)


def _join(
    open_group: Callable[[], Store], options: JoinOptions, opened_store: Callable[[], Store]
) -> Group:
    if many_ranks():
        from diloco.ranks.group import join_ranks  # it imports this module, and more of torch

        return join_ranks(open_group, options, open_store=opened_store)
    group = Group(open_group(), options)
    group._start()
    return group


def replica_number(environment: Mapping[str, str]) -> int | None:
    """Return the number in ``REPLICA_RANK``; None if it is not set. Raises :class:`ValueError`."""
    text = environment.get("REPLICA_RANK", "")
    if text and not text.isdecimal():
        raise ValueError(
            f"REPLICA_RANK: expected a replica number, found {text!r}. Set it to 0, 1, ... or "
            "unset it to take a free number"
        )
    return int(text) if text else None


def many_ranks() -> bool:
    """Return whether this process is one of several ranks of its replica."""
    ready = distributed.is_available() and distributed.is_initialized()
    return ready and distributed.get_world_size() > 1
