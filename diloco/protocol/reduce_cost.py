"""The cost of each reduce plan to one replica in a round: bytes, requests, seconds.

With Sc bytes per payload, Sr reduced bytes and N contributors, every contributor uploads Sc; then

- *gather*: downloads (N-1) Sc.
- *sharded*: uploads Sr/N more and downloads (N-1)(Sc + Sr)/N: its slice of the other payloads and
  the other reduced shards. This is the minimum for a store that cannot add, except for the 1/N
  that a replica uploads without need, its own slice.
- *syncer*: downloads Sr; the syncer itself downloads N Sc and uploads Sr.

With a low-bit mean, the owner of a shard also downloads and uploads its residual
(:mod:`diloco.exchange.low_bit_mean`); this counts rounds after one with the same owners.

The functions count exact bytes: slices are whole blocks, an object has a header. An object takes
its size over :data:`~diloco.protocol.blocks.PART_BYTES` requests, rounded up; a multipart upload
takes two more, and the record of a payload one. A contributor also reads back part of its
upload (:func:`read_back_cost`). Polling, leases and telemetry are not counted.
``bench/plan_traffic.py`` compares these figures with the traffic of a real store.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from diloco.protocol.blocks import (
    HEADER_BYTES,
    Span,
    block_elements,
    largest_shard,
    part_count,
    part_elements,
    read_back_ranges,
    shard_spans,
)
from diloco.protocol.payload_size import (
    DEFAULT_TOPK,
    FULL_MEAN,
    RESIDUAL_CODEC,
    checked_bytes,
    payload_bytes,
    reduced_codec,
)
from diloco.protocol.round_view import GATHER, SHARDED, SYNCER
from diloco.store.base import PART_BYTES

BANDWIDTH = 100e6
"""Default bandwidth of a replica's connection to the bucket, bytes per second."""
LATENCY_S = 0.1
"""Default time to the first byte of a request, seconds; half of the typical figure of object
stores."""
IN_FLIGHT = 4
"""Concurrent requests."""
SYNCER_SPEED = 10
"""Bandwidth of the syncer relative to a replica's: it runs in the bucket's region."""
LARGE_SHARD_PARTS = 8
"""Parts of the mean from which on an owner has two shards instead of one: the others read the first
one while it sums and stores the second one. Two small objects would cost more requests than this
saves."""


@dataclass(frozen=True, kw_only=True)
class RoundCost:
    """Traffic of one process in one round. ``stages`` is the number of times it waits for other
    processes."""

    up: int = 0
    down: int = 0
    puts: int = 0
    gets: int = 0
    stages: int = 1

    @property
    def round_trips(self) -> int:
        """Sequential requests with :data:`IN_FLIGHT` at a time, and two polls per stage."""
        return -(-(self.puts + self.gets) // IN_FLIGHT) + 2 * self.stages

    def seconds(self, *, bandwidth: float = BANDWIDTH, latency_s: float = LATENCY_S) -> float:
        """Return the duration of the transfers, with ``bandwidth`` in bytes per second."""
        return (self.up + self.down) / bandwidth + self.round_trips * latency_s


@dataclass(frozen=True)
class _Body:
    """Size in bytes of a fragment's encoded body."""

    numel: int
    codec: str
    topk: int

    def bytes(self, span: Span) -> int:
        return payload_bytes(span.numel, self.codec, topk=self.topk)

    def checked_bytes(self, span: Span) -> int:
        """Return the size with the checksums of blocks."""
        block = block_elements(self.numel)
        return checked_bytes(span.numel, self.codec, block=block, topk=self.topk)

    def parts(self, span: Span) -> int:
        block = block_elements(self.numel)
        block_bytes = payload_bytes(block, self.codec, topk=self.topk)
        return part_count(span, block=block, block_bytes=block_bytes)


class _Reduced(_Body):
    """Size in bytes of a fragment's mean, and of the residual behind a low-bit one."""

    def __init__(self, numel: int, codec: str, mean_codec: str) -> None:
        super().__init__(numel, reduced_codec(codec, mean_codec), DEFAULT_TOPK)
        has_residual = mean_codec != FULL_MEAN
        self._residual = _Body(numel, RESIDUAL_CODEC, DEFAULT_TOPK) if has_residual else None

    def residual_bytes(self, span: Span) -> int:
        return self._residual.checked_bytes(span) if self._residual else 0

    def residual_parts(self, span: Span) -> int:
        return self._residual.parts(span) if self._residual else 0

    def object_bytes(self, span: Span) -> int:
        """Return the size of the object of a shard."""
        return self.bytes(span) + self.residual_bytes(span)


@lru_cache(maxsize=1024)  # a sweep over H repeats the same arguments
def round_cost(
    *,
    numel: int,
    codec: str,
    replicas: int,
    mode: str,
    rank: int = 0,
    topk: int = DEFAULT_TOPK,
    mean_codec: str = FULL_MEAN,
) -> RoundCost:
    """Return the cost to the contributor of that rank; ``numel`` is the size of the round's
    fragment.

    Excludes :func:`read_back_cost`, which is the same in every plan.
    """
    whole = Span(0, numel)
    payload = _Body(numel, codec, topk)
    reduced = _Reduced(numel, codec, mean_codec)
    up = HEADER_BYTES + payload.checked_bytes(whole)
    puts = _uploads(up) + 1
    others, down, gets = replicas - 1, 0, 0
    if mode == GATHER:
        down, gets = others * payload.checked_bytes(whole), others * payload.parts(whole)
        return RoundCost(up=up, down=down, puts=puts, gets=gets)
    if mode == SYNCER:
        down, gets = reduced.bytes(whole), reduced.parts(whole)
        return RoundCost(up=up, down=down, puts=puts, gets=gets, stages=2)
    assert mode == SHARDED, mode
    per_owner = shards_per_owner(numel=numel, codec=codec, replicas=replicas, mean_codec=mean_codec)
    for shard, span in enumerate(shard_spans(numel, replicas * per_owner)):
        if shard % replicas == rank:
            up += reduced.object_bytes(span)
            puts += _uploads(reduced.object_bytes(span))
            down += others * payload.checked_bytes(span) + reduced.residual_bytes(span)
            gets += others * payload.parts(span) + reduced.residual_parts(span)
        else:
            down += reduced.bytes(span)
            gets += reduced.parts(span)
    return RoundCost(up=up, down=down, puts=puts, gets=gets, stages=2)


@lru_cache(maxsize=1024)
def owners_by_shards(
    *, numel: int, codec: str, replicas: int, mean_codec: str = FULL_MEAN
) -> tuple[tuple[int, int], ...]:
    """Group the owners by the sizes of their shards, on which alone their cost depends: the first
    rank and the number of ranks of each group."""
    per_owner = shards_per_owner(numel=numel, codec=codec, replicas=replicas, mean_codec=mean_codec)
    spans = shard_spans(numel, replicas * per_owner)
    sizes = [tuple(span.numel for span in spans[rank::replicas]) for rank in range(replicas)]
    return tuple((sizes.index(size), ranks) for size, ranks in Counter(sizes).items())


def shards_per_owner(*, numel: int, codec: str, replicas: int, mean_codec: str = FULL_MEAN) -> int:
    """Return the number of shards of each owner in a sharded round of so many contributors. The
    first shards of all owners come before their second ones."""
    parts = _Reduced(numel, codec, mean_codec).parts(largest_shard(numel, replicas))
    return 2 if parts >= LARGE_SHARD_PARTS else 1


def read_back_cost(
    *, numel: int, codec: str, round: int, verify_bytes: int, topk: int = DEFAULT_TOPK
) -> RoundCost:
    """Return the cost to a contributor of checking its own upload (:mod:`diloco.exchange.upload`):
    the parts from number ``round`` on, up to ``verify_bytes``, but at least one."""
    body, whole = _Body(numel, codec, topk), Span(0, numel)
    parts, block = body.parts(whole), block_elements(numel)
    step = part_elements(block=block, block_bytes=body.bytes(Span(0, block)))
    down = gets = read = 0
    for offset in range(parts if verify_bytes else 0):
        part = (round + offset) % parts
        size_bytes = body.checked_bytes(Span(part * step, min(numel, (part + 1) * step)))
        if read and read + size_bytes > verify_bytes:
            break
        read += size_bytes
        stored = size_bytes + (HEADER_BYTES if part == 0 else 0)
        down += stored
        gets += len(read_back_ranges(stored))
    return RoundCost(down=down, gets=gets, stages=0)


@lru_cache(maxsize=256)
def syncer_cost(
    *,
    numel: int,
    codec: str,
    replicas: int,
    topk: int = DEFAULT_TOPK,
    mean_codec: str = FULL_MEAN,
) -> RoundCost:
    """Return the cost to the syncer itself, which uploads no payload."""
    whole = Span(0, numel)
    payload = _Body(numel, codec, topk)
    reduced = _Reduced(numel, codec, mean_codec)
    return RoundCost(
        up=reduced.object_bytes(whole),
        down=replicas * payload.checked_bytes(whole) + reduced.residual_bytes(whole),
        puts=_uploads(reduced.object_bytes(whole)),
        gets=replicas * payload.parts(whole) + reduced.residual_parts(whole),
    )


def cheapest_plan(
    *,
    numel: int,
    codec: str,
    replicas: int,
    syncer: bool,
    topk: int = DEFAULT_TOPK,
    mean_codec: str = FULL_MEAN,
) -> str:
    """Return the plan with the shortest transfer time for a replica; of equal ones the simplest.

    The syncer's own transfers count with :data:`SYNCER_SPEED` times the bandwidth.
    """

    def seconds(mode: str) -> float:
        cost = round_cost(
            numel=numel,
            codec=codec,
            replicas=replicas,
            mode=mode,
            topk=topk,
            mean_codec=mean_codec,
        )
        total_s = cost.seconds(bandwidth=BANDWIDTH, latency_s=LATENCY_S)
        if mode == SYNCER:
            syncer = syncer_cost(
                numel=numel, codec=codec, replicas=replicas, topk=topk, mean_codec=mean_codec
            )
            total_s += syncer.seconds(
                bandwidth=SYNCER_SPEED * BANDWIDTH, latency_s=LATENCY_S / SYNCER_SPEED
            )
        return total_s

    modes = [GATHER, SHARDED, *([SYNCER] if syncer else [])]
    return min(modes, key=seconds)


def _uploads(size_bytes: int) -> int:
    """Return the number of requests to upload an object: one, or its parts, begin and
    completion."""
    parts = -(-size_bytes // PART_BYTES)
    return parts + 2 if parts > 1 else 1
