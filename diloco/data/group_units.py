"""Work units of a replica in a group: claimed by its first rank, shared with the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from diloco.clock import Clock
from diloco.data.sample_stream import Place, SampleOrder
from diloco.data.shard_check import check_settings
from diloco.data.shard_index import ShardIndex
from diloco.data.unit_log import UnitLog
from diloco.data.unit_records import LAST_UNIT, UnitPlan
from diloco.data.work_units import WorkUnits
from diloco.membership.observer import Observer
from diloco.protocol.records import Identity
from diloco.protocol.settings import GroupSettings
from diloco.store.base import Store

MOST_STRIPES = 64


class Watcher(Protocol):
    """:class:`~diloco.training.hooks.RoundWatcher`."""

    def before(self, round: int) -> None: ...

    def after(self, round: int, outcome: str) -> None: ...

    def discarded(self) -> None: ...


class UnitGroup(Protocol):
    """The part of :class:`~diloco.training.group.Group` that work units need."""

    @property
    def settings(self) -> GroupSettings: ...

    @property
    def identity(self) -> Identity: ...

    @property
    def store(self) -> Store: ...

    @property
    def clock(self) -> Clock: ...

    def observer(self) -> Observer: ...

    def watch(self, watcher: Watcher) -> None: ...


def unit_plan(
    index: ShardIndex, order: SampleOrder, settings: GroupSettings, *, seed: int
) -> UnitPlan:
    """Return the division of an epoch: units of one round of a replica, larger ones where there
    would be too many."""
    of_round = settings.round_steps * settings.batch_size
    return UnitPlan(
        shards=index.digest,
        context=order.context,
        seed=seed,
        samples=order.samples,
        unit_samples=max(of_round, -(-order.samples // LAST_UNIT)),
        stripes=min(settings.num_replicas, MOST_STRIPES),
    )


def join_units(
    group: UnitGroup, index: ShardIndex, order: SampleOrder, *, seed: int
) -> Callable[[int], list[Place]]:
    """Return a function that returns the next samples of this process, and record them in the
    group's rounds. Raises :class:`SettingsError` for settings that work units do not support."""
    check_settings(group.settings)
    observer = group.observer()

    def is_gone(process: Identity) -> bool:
        observer.look(only={process.replica})
        return observer.is_gone(process)

    units = WorkUnits(
        UnitLog(group.store, group.identity),
        unit_plan(index, order, group.settings, seed=seed),
        is_gone=is_gone,
        clock=group.clock,
        timeout_s=group.settings.heartbeat_timeout_s,
    )
    group.watch(units)
    return units.take


def take_units(
    group: UnitGroup, index: ShardIndex, order: SampleOrder, *, seed: int
) -> Callable[[int], list[Place]]:
    """Like :func:`join_units`, in a replica of any number of ranks, which all call it and its
    result together; needs torch."""
    from torch import distributed

    many = distributed.is_available() and distributed.is_initialized()
    if not many or distributed.get_world_size() == 1:
        return join_units(group, index, order, seed=seed)
    is_first = distributed.get_rank() == 0
    return shared_by_ranks(join_units(group, index, order, seed=seed) if is_first else None)


def shared_by_ranks(take: Callable[[int], list[Place]] | None) -> Callable[[int], list[Place]]:
    """Return a function that all ranks of ``torch.distributed`` call together: the first one calls
    ``take`` and the others get its result or its exception."""
    import torch
    from torch import distributed

    def shared(count: int) -> list[Place]:
        message: list[Any] = [None]
        if take is not None:
            try:
                message = [take(count)]
            except Exception as error:
                message = [error]
        distributed.broadcast_object_list(message, src=0, device=torch.device("cpu"))
        if isinstance(message[0], Exception):
            raise message[0]
        return [Place(*place) for place in message[0]]

    return shared
