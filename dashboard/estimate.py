"""What a draft will move and train, before it is launched: the form asks for it as JSON and only
shows it. The bytes are :mod:`diloco.rendezvous.cost`'s, for the *gather* plan.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from diloco.rendezvous import cost
from runs.presets import RunDraft


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """``reduction``: bytes a ring all-reduce of fp32 gradients at every step would move, over the
    bytes this run moves; None with one replica, where nothing needs to move."""

    parameters: int
    payload_bytes: int
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
    moved = cost.gather(numel=parameters, codec=settings.codec, replicas=replicas)

    tokens_per_round = settings.sync_every * settings.batch_size * shape.context * replicas
    rounds = settings.total_rounds
    if settings.max_tokens:
        # The run ends with the round in which the limit is reached.
        rounds = min(rounds, -(-settings.max_tokens // tokens_per_round))

    ring = cost.ring_all_reduce(numel=parameters, replicas=replicas) * settings.sync_every
    return Estimate(
        parameters=parameters,
        payload_bytes=moved.up,
        up_bytes_per_round=moved.up,
        down_bytes_per_round=moved.down,
        total_bytes=rounds * replicas * (moved.up + moved.down),
        rounds=rounds,
        steps=rounds * settings.sync_every,
        tokens=rounds * tokens_per_round,
        tokens_per_round=tokens_per_round,
        reduction=ring / (moved.up + moved.down) if replicas > 1 else None,
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
