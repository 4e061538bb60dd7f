"""What a draft will move and train, before it is launched. The one place with these formulas:
the form asks for them as JSON and only shows them.

They cover the *gather* plan, the one that replicas speak today: everybody uploads one payload and
reads those of all others. Headers and records (a few kilobytes) are left out.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from runs.presets import RunDraft

BYTES_PER_VALUE = {"fp32": 4, "bf16": 2}


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
    payload = parameters * BYTES_PER_VALUE[settings.codec]
    down = (replicas - 1) * payload

    tokens_per_round = settings.sync_every * settings.batch_size * shape.context * replicas
    rounds = settings.total_rounds
    if settings.max_tokens:
        # The run ends with the round in which the limit is reached.
        rounds = min(rounds, -(-settings.max_tokens // tokens_per_round))

    # A ring all-reduce moves 2 (n - 1) / n of the gradient up and as much down, every step.
    ring = 2 * (replicas - 1) / replicas * parameters * 4 * 2 * settings.sync_every
    return Estimate(
        parameters=parameters,
        payload_bytes=payload,
        up_bytes_per_round=payload,
        down_bytes_per_round=down,
        total_bytes=rounds * replicas * (payload + down),
        rounds=rounds,
        steps=rounds * settings.sync_every,
        tokens=rounds * tokens_per_round,
        tokens_per_round=tokens_per_round,
        reduction=ring / (payload + down) if replicas > 1 else None,
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
