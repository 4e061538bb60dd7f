"""One rank's part of the reduction of a round.

A *gathered* round: each rank reads and sums its slice of all payloads.

A round whose mean is stored: each rank reads its slice of the mean. A shard that this replica owns
is divided into *shares* of whole blocks, one per rank. Each rank sums and encodes its share; one of
them, the *writer* of the shard, receives the encoded shares and stores them as one object. Then
each rank receives its slice of the decoded shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

import torch
from torch import Tensor

from diloco.exchange.checked_blocks import raw
from diloco.exchange.mean_reader import Chunks
from diloco.exchange.payload_reader import Own
from diloco.exchange.reduce import Reduction
from diloco.exchange.timings import Timings
from diloco.model.outer_optimizer import chunk_digests, vector_bytes
from diloco.protocol import keys
from diloco.protocol.blocks import Span, block_elements, shard_spans
from diloco.protocol.records import Plan
from diloco.ranks.command_channel import CommandChannel
from diloco.ranks.redistribute import common, redistribute, rescale_slices
from diloco.store.base import PART_BYTES, Store
from diloco.store.daemon import call_in_daemon


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank is in its replica: its channel, and the slices of the fragment by rank."""

    channel: CommandChannel
    slices: Sequence[Span]

    @property
    def slice(self) -> Span:
        """This rank's slice."""
        return self.slices[self.channel.rank]


@dataclass(frozen=True, kw_only=True)
class _Share:
    """This rank's encoded share of a shard; the ``vector`` is decoded."""

    spans: Sequence[Span]
    vector: Tensor
    mean: Tensor
    residual: Tensor
    reduction: Reduction


class RankRound:
    """The part of one rank in the reduction of one plan.

    ``store`` opens the store or returns it. It is called after the collective operations of a
    method, so that an error of it leaves no other rank waiting. ``reduction`` makes the reduction
    of some elements by this process. ``own`` is this rank's slice of the replica's own
    contribution, None without one.
    """

    def __init__(
        self,
        plan: Plan,
        place: Place,
        store: Callable[[], Store],
        *,
        reduction: Callable[[Span, Own | None], Reduction],
        own: Own | None,
        timings: Timings,
    ) -> None:
        self.plan = plan
        self.timings = timings
        self._place = place
        self._open_store = store
        self._make = reduction
        self._own = own
        self._share: _Share | None = None
        self._storing: list[Future[None]] = []

    @cached_property
    def _reduction(self) -> Reduction:
        """The reduction of this rank's slice."""
        return self._make(self._place.slice, self._own)

    @property
    def merged(self) -> Tensor:
        """This rank's slice of the merged mean."""
        return self._reduction.merged

    def gather(self) -> str:
        """Sum this rank's slice of all payloads; return its chunk digests in hex. Raises
        :class:`~diloco.exchange.reduce.CannotReduce`, as all methods that read do."""
        if not self._place.slice.numel:
            return ""
        return chunk_digests(vector_bytes(self._reduction.gather_span())).hex()

    def products(self) -> tuple[float, float, float] | None:
        """Return this rank's part of the cosine; None without elements or contribution."""
        if not self._place.slice.numel or self._own is None:
            return None
        with self.timings.measure("reduce"):
            return self._reduction.products(self.merged)

    def restore_norms(self) -> None:
        """Scale the merged mean to the norms of RDA, on all ranks together."""
        place = self._place
        with self.timings.measure("reduce"):
            rescale_slices(place.channel, self.merged, place.slices, self._reduction.lengths)

    # -- the stored mean -------------------------------------------------------------------------

    def read_mean(self, digests: Mapping[int, str], *, early: bool) -> dict[int, Chunks]:
        """Read this rank's slice of shards; return the chunks that were read."""
        return self._reduction.read_mean(digests, early=early)

    def expect(self, digests: Mapping[int, str]) -> None:
        """Begin to read this rank's slice of the shards that a commit is expected to name."""
        self._reduction.expect(digests)

    def close(self) -> None:
        """End the reads that have begun."""
        self._reduction.close()

    def sum_share(self, shard: int) -> None:
        """Sum and encode this rank's share of a shard."""
        self._share = None
        spans = shares(self._shard(shard), self._numel, self._place.channel.size)
        span = spans[self._place.channel.rank]
        reduction = self._make(span, self._own_share(spans))
        nothing = torch.empty(0, dtype=torch.uint8)
        mean, residual = reduction.encoded_span() if span.numel else (nothing, nothing)
        self._share = _Share(
            spans=spans,
            vector=reduction.merged,
            mean=mean,
            residual=residual,
            reduction=reduction,
        )

    def join_shares(self, shard: int, *, writer: int) -> str:
        """Send the encoded shares to the ``writer``, which begins to store them, and the decoded
        ones to the ranks that hold their elements. Return the shard's digest on the writer, ''
        on the other ranks."""
        share, self._share = self._share, None
        assert share is not None
        channel, own = self._place.channel, self._place.slice
        whole = self._shard(shard)
        wanted = [common(whole, held) for held in self._place.slices]
        into = wanted[channel.rank]
        received = redistribute(channel, share.vector, share.spans, wanted)
        self.merged[into.start - own.start : into.stop - own.start] = received
        ends = [share.reduction.object_bytes(span.stop - whole.start) for span in share.spans]
        bodies = [
            self._sent_to(writer, body, [end[index] for end in ends])
            for index, body in enumerate((share.mean, share.residual))
        ]
        if channel.rank != writer:
            return ""
        body = torch.cat(bodies)
        digest = share.reduction.digest_of_shard(shard, body)
        key = keys.reduced_shard(self.plan.round, shard, digest)
        put = self._open_store().put_stream
        store = partial(put, key, lambda: _parts(body), size_bytes=len(body))
        self._storing.append(_called(store))
        return digest

    def finish_storing(self) -> None:
        """Wait until the shards that this rank stores are durable. Raises
        :class:`~diloco.store.base.StoreError`."""
        storing, self._storing = self._storing, []
        with self.timings.measure("upload"):
            for stored in storing:
                stored.exception()
        for stored in storing:
            stored.result()

    @property
    def _numel(self) -> int:
        return self._place.slices[-1].stop

    def _shard(self, shard: int) -> Span:
        return shard_spans(self._numel, len(self.plan.owners))[shard]

    def _own_share(self, spans: Sequence[Span]) -> Own | None:
        """Return this rank's share of the replica's own contribution; None, so that it is read from
        the store, if a rank does not have its slice any more."""
        own, channel = self._own, self._place.channel
        if channel.total(0 if own else 1):
            return None
        assert own is not None
        vector = redistribute(channel, own.vector, self._place.slices, spans)
        return replace(own, vector=vector, body=None, start=spans[channel.rank].start)

    def _sent_to(self, writer: int, body: Tensor, ends: Sequence[int]) -> Tensor:
        """Join the bytes of all ranks on the writer; each rank's end at its ``ends``."""
        held = [Span(start, stop) for start, stop in pairwise([0, *ends])]
        size = range(self._place.channel.size)
        wanted = [Span(0, ends[-1] if rank == writer else 0) for rank in size]
        return redistribute(self._place.channel, body, held, wanted)


def shares(shard: Span, numel: int, ranks: int) -> list[Span]:
    """Divide a shard of a fragment of ``numel`` elements into whole blocks for each rank."""
    block = block_elements(numel)
    count = -(-shard.numel // block)
    ends = [
        min(shard.stop, shard.start + count * rank // ranks * block) for rank in range(ranks + 1)
    ]
    return [Span(start, stop) for start, stop in pairwise(ends)]


def _parts(body: Tensor) -> Iterator[memoryview]:
    """Yield an object in the parts of its upload; one of no bytes for an empty one."""
    for start in range(0, max(1, len(body)), PART_BYTES):
        yield raw(body[start : start + PART_BYTES])


def _called(function: Callable[[], None]) -> Future[None]:
    """Call a function in a thread, or here if the system starts none."""
    with suppress(RuntimeError):
        return call_in_daemon(function, name="store_shard")
    called: Future[None] = Future()
    try:
        function()
        called.set_result(None)
    except Exception as error:
        called.set_exception(error)
    return called
