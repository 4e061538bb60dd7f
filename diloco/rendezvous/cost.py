"""What a round costs in bytes: the arithmetic that the submit form, the codecs and bench/ share.

Per replica and round, with payload bytes Sc and N contributors, the *gather* plan moves up Sc and
down (N-1) Sc. Headers and records are left out: they are a few kilobytes, whatever the model.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_VALUE = {"fp32": 4, "bf16": 2}
"""Encoded size of one element, by codec."""


@dataclass(frozen=True, kw_only=True)
class RoundBytes:
    """Bytes one replica moves in one round."""

    up: int
    down: int


def payload_bytes(numel: int, codec: str) -> int:
    """Body of one payload, Sc."""
    return numel * BYTES_PER_VALUE[codec]


def gather(*, numel: int, codec: str, replicas: int) -> RoundBytes:
    size = payload_bytes(numel, codec)
    return RoundBytes(up=size, down=(replicas - 1) * size)


def ring_all_reduce(*, numel: int, replicas: int) -> float:
    """Bytes each replica sends *and* receives in one fp32 ring all-reduce of the gradients: what
    data parallel training moves at every step, for comparison."""
    return 2 * 2 * (replicas - 1) / replicas * 4 * numel
