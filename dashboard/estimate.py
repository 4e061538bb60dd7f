"""What a draft will move and train, before it is launched: the form asks for it as JSON and only
shows it. The bytes are :mod:`diloco.rendezvous.plan_cost`'s, with every replica in every round.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from diloco.rendezvous.cost import ring_all_reduce
from diloco.rendezvous.simulation import rounds_of
from diloco.rendezvous.traffic import mode_of, round_traffic
from runs.presets import RunDraft


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes up and down are of the replica that moves most. ``reduction``: bytes a ring all-reduce
    of fp32 gradients at every step would move, over the bytes this run moves; None with one
    replica, where nothing needs to move."""

    parameters: int
    reduce_plan: str
    up_bytes_per_round: int
    down_bytes_per_round: int
    total_bytes: int
    rounds: int
    steps: int
    tokens: int
    tokens_per_round: int
    reduction: float | None
    effective_json: str


def estimate(draft: RunDraft) -> Estimate:
    settings, shape = draft.settings, draft.workload.shape
    replicas = settings.num_replicas
    parameters = shape.parameters
    traffic = round_traffic(settings, parameters, mode=mode_of(settings, parameters))
    moved_per_round = traffic.up + traffic.down

    tokens_per_step = settings.batch_size * shape.context
    tokens_per_round = settings.round_steps * tokens_per_step * replicas
    rounds = rounds_of(settings, tokens_per_step)
    ring_per_step = replicas * ring_all_reduce(numel=parameters, replicas=replicas)
    return Estimate(
        parameters=parameters,
        reduce_plan=traffic.mode,
        up_bytes_per_round=traffic.replica.up,
        down_bytes_per_round=traffic.replica.down,
        total_bytes=rounds * moved_per_round,
        rounds=rounds,
        steps=rounds * settings.round_steps,
        tokens=rounds * tokens_per_round,
        tokens_per_round=tokens_per_round,
        reduction=ring_per_step * settings.round_steps / moved_per_round if replicas > 1 else None,
        effective_json=json.dumps(
            {
                "name": draft.name,
                "settings": settings.to_dict(),
                "workload": draft.workload.to_dict(),
                "pools": [asdict(pool) for pool in draft.pools],
                "time_limit_s": draft.time_limit_s,
            },
            indent=2,
        ),
    )
