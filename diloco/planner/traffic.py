"""What a whole group moves in a round in which everybody takes part: :mod:`plan_cost` summed up.

The submit form, the planner and ``python -m diloco.simulate`` share it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from diloco.protocol.blocks import shard_spans
from diloco.protocol.reduce_cost import RoundCost, cheapest_plan, round_cost, syncer_cost
from diloco.protocol.round_view import GATHER, SHARDED, SYNCER
from diloco.protocol.settings import GroupSettings

NOTHING = RoundCost(stages=0)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """``replica`` is the cost to the replica with the largest shard; ``syncer`` the syncer's own.
    ``up`` to ``gets`` are sums over all of them. ``egress`` are the bytes that leave the bucket's
    region if every replica stands outside it; the syncer stands inside."""

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
    """Parameters of a round's fragment if they are cut evenly."""
    return -(-parameters // settings.num_fragments)


def modes(settings: GroupSettings) -> tuple[str, ...]:
    """The reduce plans that such a group can choose from."""
    return (GATHER,) if settings.num_replicas == 1 else (GATHER, SHARDED, SYNCER)


def mode_of(settings: GroupSettings, parameters: int) -> str:
    """The reduce plan of a full round. ``auto`` does not count on a syncer being there."""
    if settings.num_replicas == 1:
        return GATHER
    if settings.reduce_plan != "auto":
        return settings.reduce_plan
    return cheapest_plan(
        numel=fragment_parameters(settings, parameters),
        codec=settings.codec,
        topk=settings.topk,
        replicas=settings.num_replicas,
        syncer=False,
    )


def round_traffic(settings: GroupSettings, parameters: int, *, mode: str) -> Traffic:
    replicas, numel = settings.num_replicas, fragment_parameters(settings, parameters)
    codec, topk = settings.codec, settings.topk
    # What a rank moves depends on the size of its shard alone, and there are few sizes.
    sizes = [span.numel for span in shard_spans(numel, replicas)]
    costs = [
        (
            ranks,
            round_cost(
                numel=numel,
                codec=codec,
                topk=topk,
                replicas=replicas,
                mode=mode,
                rank=sizes.index(size),
            ),
        )
        for size, ranks in Counter(sizes).items()
    ]
    syncer = NOTHING
    if mode == SYNCER:
        syncer = syncer_cost(numel=numel, codec=codec, topk=topk, replicas=replicas)
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
