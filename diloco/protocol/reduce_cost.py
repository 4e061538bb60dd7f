"""What each reduce plan costs one replica in a round: bytes, requests, seconds.

With payload bytes Sc, reduced bytes Sr and N contributors, every contributor uploads Sc; then

- *gather*: down (N-1) Sc.
- *sharded*: up Sr/N more; down (N-1)(Sc + Sr)/N: its slice of the others' payloads, the others'
  shards. For a store that cannot add, this is the least there is, but for the 1/N of one's own
  slice that is uploaded in vain.
- *syncer*: down Sr; the syncer itself N Sc down and Sr up.

Here the same is counted to the byte: slices are whole blocks, an object has a header. Requests of
an object are its bytes over :data:`~diloco.protocol.blocks.PART_BYTES`, rounded up; a multipart
upload costs two more, and the record that names a payload is one. A contributor also reads back
its own upload, up to a limit (:func:`read_back_cost`). Polling, leases and telemetry are not part
of it. ``bench/plan_traffic.py`` holds it against what a real store sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from diloco.protocol.blocks import (
    HEADER_BYTES,
    Span,
    block_elements,
    part_count,
    part_elements,
    shard_spans,
)
from diloco.protocol.payload_size import DEFAULT_TOPK, payload_bytes
from diloco.protocol.round_view import GATHER, SHARDED, SYNCER
from diloco.store.base import PART_BYTES

BANDWIDTH = 100e6
"""Bytes per second of one replica's connection to the bucket, where nothing better is known."""
LATENCY_S = 0.1
"""Of a request's first byte, seconds; half of what object stores are known for."""
IN_FLIGHT = 4
"""Requests at a time."""
SYNCER_SPEED = 10
"""How many times faster than a replica's the syncer's way to the bucket is: it stands beside it."""


def reduced_codec(codec: str) -> str:
    """Name of the codec that the merged mean of such payloads travels in.

    A mean must not be squeezed twice: those that lose much send it whole.
    """
    return codec if codec in ("fp32", "bf16") else "fp32"


@dataclass(frozen=True, kw_only=True)
class RoundCost:
    """What one process moves in one round. ``stages`` is how often it must wait for others."""

    up: int = 0
    down: int = 0
    puts: int = 0
    gets: int = 0
    stages: int = 1

    @property
    def round_trips(self) -> int:
        """Requests one after the other, :data:`IN_FLIGHT` at a time, and two looks a stage."""
        return -(-(self.puts + self.gets) // IN_FLIGHT) + 2 * self.stages

    def seconds(self, *, bandwidth: float = BANDWIDTH, latency_s: float = LATENCY_S) -> float:
        """Time of the transfers themselves, with ``bandwidth`` in bytes per second."""
        return (self.up + self.down) / bandwidth + self.round_trips * latency_s


@dataclass(frozen=True)
class _Body:
    """Sizes of a fragment's encoded body."""

    numel: int
    codec: str
    topk: int

    def bytes(self, span: Span) -> int:
        return payload_bytes(span.numel, self.codec, topk=self.topk)

    def parts(self, span: Span) -> int:
        block = block_elements(self.numel)
        block_bytes = payload_bytes(block, self.codec, topk=self.topk)
        return part_count(span, block=block, block_bytes=block_bytes)


@lru_cache(maxsize=1024)  # a sweep over H asks for the same again and again
def round_cost(
    *,
    numel: int,
    codec: str,
    replicas: int,
    mode: str,
    rank: int = 0,
    topk: int = DEFAULT_TOPK,
) -> RoundCost:
    """The cost to the contributor of that rank; ``numel`` is of the round's fragment.

    Left out, because it is the same in every plan: :func:`read_back_cost`.
    """
    whole = Span(0, numel)
    payload = _Body(numel, codec, topk)
    reduced = _Body(numel, reduced_codec(codec), topk)
    up = HEADER_BYTES + payload.bytes(whole)
    puts = _uploads(HEADER_BYTES + payload.bytes(whole)) + 1
    others = replicas - 1
    if mode == GATHER:
        down, gets = others * payload.bytes(whole), others * payload.parts(whole)
        return RoundCost(up=up, down=down, puts=puts, gets=gets)
    if mode == SYNCER:
        down, gets = reduced.bytes(whole), reduced.parts(whole)
        return RoundCost(up=up, down=down, puts=puts, gets=gets, stages=2)
    assert mode == SHARDED, mode
    spans = shard_spans(numel, replicas)
    mine = spans[rank]
    theirs = [span for span in spans if span is not mine]
    return RoundCost(
        up=up + reduced.bytes(mine),
        down=others * payload.bytes(mine) + sum(reduced.bytes(span) for span in theirs),
        puts=puts + _uploads(reduced.bytes(mine)),
        gets=others * payload.parts(mine) + sum(reduced.parts(span) for span in theirs),
        stages=2,
    )


def read_back_cost(
    *, numel: int, codec: str, round: int, verify_bytes: int, topk: int = DEFAULT_TOPK
) -> RoundCost:
    """What the check of the replica's own upload (:mod:`diloco.exchange.upload`) costs a
    contributor, in every plan: parts from the one of the round on, up to ``verify_bytes``, but one
    at least."""
    body, whole = _Body(numel, codec, topk), Span(0, numel)
    parts, block = body.parts(whole), block_elements(numel)
    step = part_elements(block=block, block_bytes=body.bytes(Span(0, block)))
    down = gets = read = 0
    for turn in range(parts if verify_bytes else 0):
        part = (round + turn) % parts
        size_bytes = body.bytes(Span(part * step, min(numel, (part + 1) * step)))
        if read and read + size_bytes > verify_bytes:
            break
        read += size_bytes
        down += size_bytes + (HEADER_BYTES if part == 0 else 0)
        gets += 1
    return RoundCost(down=down, gets=gets, stages=0)


@lru_cache(maxsize=256)
def syncer_cost(*, numel: int, codec: str, replicas: int, topk: int = DEFAULT_TOPK) -> RoundCost:
    """The cost to the syncer itself, which uploads no payload."""
    whole = Span(0, numel)
    payload = _Body(numel, codec, topk)
    reduced = _Body(numel, reduced_codec(codec), topk)
    return RoundCost(
        up=reduced.bytes(whole),
        down=replicas * payload.bytes(whole),
        puts=_uploads(reduced.bytes(whole)),
        gets=replicas * payload.parts(whole),
    )


def cheapest_plan(
    *,
    numel: int,
    codec: str,
    replicas: int,
    syncer: bool,
    topk: int = DEFAULT_TOPK,
    bandwidth: float = BANDWIDTH,
    latency_s: float = LATENCY_S,
) -> str:
    """The plan whose transfers take a replica the least time; in a draw the simpler one.

    The syncer's own transfers count at :data:`SYNCER_SPEED` times the bandwidth.
    """

    def seconds(mode: str) -> float:
        cost = round_cost(numel=numel, codec=codec, replicas=replicas, mode=mode, topk=topk)
        spent = cost.seconds(bandwidth=bandwidth, latency_s=latency_s)
        if mode == SYNCER:
            there = syncer_cost(numel=numel, codec=codec, replicas=replicas, topk=topk)
            spent += there.seconds(
                bandwidth=SYNCER_SPEED * bandwidth, latency_s=latency_s / SYNCER_SPEED
            )
        return spent

    modes = [GATHER, SHARDED, *([SYNCER] if syncer else [])]
    return min(modes, key=seconds)


def _uploads(size_bytes: int) -> int:
    """Requests to upload an object: one, or its parts, the begin and the end."""
    parts = -(-size_bytes // PART_BYTES)
    return parts + 2 if parts > 1 else 1
