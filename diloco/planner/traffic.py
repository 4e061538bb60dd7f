"""The traffic of a whole group in a round with all replicas: :mod:`diloco.protocol.reduce_cost`
summed over the replicas.

The submit form, the planner and ``python -m diloco.simulate`` share it.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco.protocol.reduce_cost import (
    RoundCost,
    cheapest_plan,
    owners_by_shards,
    round_cost,
    syncer_cost,
)
from diloco.protocol.round_view import GATHER, SHARDED, SYNCER
from diloco.protocol.settings import GroupSettings

NOTHING = RoundCost(stages=0)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Traffic of one round.

    ``replica`` is the cost to the replica with the largest shard, ``syncer`` the syncer's own.
    ``up`` to ``gets`` are sums over all processes. ``egress`` are the bytes that leave the bucket's
    region if every replica is outside it and the syncer inside.
    """

    mode: str
    fragment_parameters: int
    replica: RoundCost
    syncer: RoundCost
    up: int
    down: int
    puts: int
    gets: int
    egress: int


def fragment_parameters(settings: GroupSettings, parameters: int) -> int:
    """Return the parameters of a round's fragment if fragments have equal sizes."""
    return -(-parameters // settings.num_fragments)


def modes(settings: GroupSettings) -> tuple[str, ...]:
    """Return the reduce plans that such a group can use."""
    return (GATHER,) if settings.num_replicas == 1 else (GATHER, SHARDED, SYNCER)


def mode_of(settings: GroupSettings, parameters: int) -> str:
    """Return the reduce plan of a full round. ``auto`` assumes that there is no syncer."""
    if settings.num_replicas == 1:
        return GATHER
    if settings.reduce_plan != "auto":
        return settings.reduce_plan
    return cheapest_plan(
        numel=fragment_parameters(settings, parameters),
        codec=settings.codec,
        topk=settings.topk,
        mean_codec=settings.mean_codec,
        replicas=settings.num_replicas,
        syncer=False,
    )


def round_traffic(settings: GroupSettings, parameters: int, *, mode: str) -> Traffic:
    """Return the traffic of a round with the reduce plan ``mode``."""
    replicas, numel = settings.num_replicas, fragment_parameters(settings, parameters)
    codec, topk, mean_codec = settings.codec, settings.topk, settings.mean_codec
    owners = owners_by_shards(numel=numel, codec=codec, replicas=replicas, mean_codec=mean_codec)
    costs = [
        (
            ranks,
            round_cost(
                numel=numel,
                codec=codec,
                topk=topk,
                mean_codec=mean_codec,
                replicas=replicas,
                mode=mode,
                rank=rank,
            ),
        )
        for rank, ranks in owners
    ]
    syncer = NOTHING
    if mode == SYNCER:
        syncer = syncer_cost(
            numel=numel, codec=codec, topk=topk, mean_codec=mean_codec, replicas=replicas
        )
    down = sum(ranks * cost.down for ranks, cost in costs)
    return Traffic(
        mode=mode,
        fragment_parameters=numel,
        replica=costs[0][1],
        syncer=syncer,
        up=sum(ranks * cost.up for ranks, cost in costs) + syncer.up,
        down=down + syncer.down,
        puts=sum(ranks * cost.puts for ranks, cost in costs) + syncer.puts,
        gets=sum(ranks * cost.gets for ranks, cost in costs) + syncer.gets,
        egress=down,
    )
