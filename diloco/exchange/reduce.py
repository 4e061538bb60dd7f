"""Reducing a planned round: read slices of payloads, verify them, sum in fp32 in rank order.

One mechanism serves all three plans. :meth:`Reducer.sum_of` merges any span of whole blocks; in a
*gathered* round every replica does that to the whole fragment, in a *sharded* one each owner to
its shard, which it stores for the others, and a *syncer* to a single shard that is all. The mean
passes through the reduced codec in every plan, and encoding is done block by block, so all three
give the same bits (I3). A payload that is missing, damaged, foreign or not finite is refused by
name; the round is then void.

Memory: the merged fragment, and parts on their way. Shards are reduced in their place in it, parts
are decoded slice by slice, and what this replica itself contributed is encoded anew from its
gradient instead of being kept twice, unless it is much smaller.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.clock import Clock
from diloco.codecs import Codec, get_codec, reduced_codec
from diloco.exchange.payload import (
    SLICE,
    BadPayload,
    decode_body,
    decode_part,
    overlaps,
    raw,
    slices,
)
from diloco.model.fragments import Slot
from diloco.model.outer_optimizer import ContentDigest, WeightedSum, digest, rescale
from diloco.protocol import keys
from diloco.protocol.blocks import (
    HEADER_BYTES,
    Span,
    block_elements,
    part_spans,
    shard_spans,
)
from diloco.protocol.parallel_reads import Range, read_parts
from diloco.protocol.reading import READS
from diloco.protocol.records import Commit, Identity, Plan, PlannedContribution
from diloco.protocol.round_view import GATHER
from diloco.protocol.settings import GroupSettings
from diloco.store.base import MissingKey, Store

log = logging.getLogger(__name__)

IN_FLIGHT = 6
"""Ranged reads ahead of the one that is being summed."""

SMALLEST_NORM = 1e-30
"""Shorter vectors have no direction: a weight divided by their length may be beyond float32."""


class CannotReduce(Exception):
    """A planned payload is missing or is not what the plan says; the round must be void."""

    def __init__(self, replica: int | None, reason: str) -> None:
        whose = f"payload of replica {replica}" if replica is not None else "reduced shard"
        super().__init__(f"{whose}: {reason}")
        self.replica = replica
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The averaged pseudo-gradient of a round, (n,) fp32 on the CPU; ``digest`` is of a gathered
    round's mean before RDA gives it its lengths, '' otherwise."""

    vector: Tensor
    digest: str = ""


@dataclass(frozen=True, kw_only=True)
class Own:
    """What this replica contributed: who it is, the digest of its payload and the vector it
    encoded, with the payload's ``body`` if it is small. A plan's line is this one only if identity
    and digest agree: whoever writes a digest may copy it."""

    identity: Identity
    digest: str
    vector: Tensor
    body: Tensor | None = None

    def made(self, planned: PlannedContribution) -> bool:
        who = Identity(replica=planned.replica, incarnation=planned.incarnation)
        return (who, planned.digest) == (self.identity, self.digest)

    def decoded(self, where: Span, codec: Codec) -> Tensor:
        """Its elements ``where`` (whole blocks), as everybody else decodes them."""
        if self.body is None:
            body = codec.encode(self.vector[where.start : where.stop])
        else:
            start = codec.encoded_bytes(where.start)
            body = self.body[start : start + codec.encoded_bytes(where.numel)]
        return codec.decode(body, where.numel)


class Meter:
    """Splits a reduction's time into waiting for bytes, working on them and storing them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.download_s = 0.0
        self.upload_s = 0.0
        self.total_s = 0.0

    def downloading(self, parts: Iterator[bytes]) -> bytes:
        start_s = self._clock.monotonic()
        try:
            return next(parts)
        finally:
            self.download_s += self._clock.monotonic() - start_s

    def uploading(self, operation: Callable[[], None]) -> None:
        start_s = self._clock.monotonic()
        try:
            operation()
        finally:
            self.upload_s += self._clock.monotonic() - start_s

    def timed(self, operation: Callable[[], None]) -> None:
        start_s = self._clock.monotonic()
        try:
            operation()
        finally:
            self.total_s += self._clock.monotonic() - start_s


class Reducer:
    """Reduces rounds of fragments; ``slots`` given to it are those of the round's fragment."""

    def __init__(self, store: Store, settings: GroupSettings, clock: Clock) -> None:
        self._store = store
        self._settings = settings
        self._codec = get_codec(settings.codec, topk=settings.topk)
        self._reduced = get_codec(reduced_codec(settings.codec))
        self._clock = clock

    def meter(self) -> Meter:
        return Meter(self._clock)

    # -- gathered --------------------------------------------------------------------------------

    def gather(self, plan: Plan, slots: Sequence[Slot], own: Own | None, meter: Meter) -> Merged:
        """Merge all of every payload. Raises :class:`CannotReduce`."""
        vector = new_fragment(slots)
        self._reduce(plan, slots, Span(0, vector.numel()), own, meter, vector)
        found = digest(vector)
        self._finish(plan, slots, vector)
        return Merged(vector=vector, digest=found)

    # -- sharded ---------------------------------------------------------------------------------

    def store_shard(
        self,
        plan: Plan,
        shard: int,
        slots: Sequence[Slot],
        own: Own | None,
        meter: Meter,
        vector: Tensor,
    ) -> str:
        """Reduce one shard in its place in ``vector`` (n,), the fragment's, and store it; returns
        its digest. Raises :class:`CannotReduce`."""
        span = shard_spans(vector.numel(), len(plan.owners))[shard]
        self._reduce(plan, slots, span, own, meter, vector)
        parts = self._parts(vector.numel(), span, self._reduced)

        def bodies() -> Iterator[memoryview]:
            for part in parts:
                yield raw(self._reduced.encode(vector[part.start : part.stop]))

        found = ContentDigest()
        for body in bodies():
            found.update(body)
        key = keys.reduced_shard(plan.round, shard, found.hexdigest())
        meter.uploading(lambda: self._store.put_stream(key, lambda: bodies() if parts else [b""]))
        return found.hexdigest()

    def collect(
        self,
        plan: Plan,
        commit: Commit,
        slots: Sequence[Slot],
        meter: Meter,
        vector: Tensor,
        done: Mapping[int, str],
    ) -> Merged:
        """Put a fragment together in ``vector`` (n,) from its reduced shards; those that were
        reduced here (``done``: their digests) lie there already. Raises :class:`CannotReduce`."""
        wanted = {
            shard: span
            for shard, span in enumerate(shard_spans(vector.numel(), len(plan.owners)))
            if done.get(shard) != commit.shards[shard]
        }
        meter.timed(lambda: self._collect(plan, commit, wanted, vector, meter))
        self._finish(plan, slots, vector)
        return Merged(vector=vector)

    def _collect(
        self, plan: Plan, commit: Commit, wanted: Mapping[int, Span], vector: Tensor, meter: Meter
    ) -> None:
        cuts = [
            (shard, span, self._parts(vector.numel(), span, self._reduced))
            for shard, span in wanted.items()
        ]
        requests = (
            (keys.reduced_shard(plan.round, shard, commit.shards[shard]), *self._range(part, span))
            for shard, span, parts in cuts
            for part in parts
        )
        stream = read_parts(self._store, requests, in_flight=IN_FLIGHT)
        damaged: dict[int, Span] = {}
        for shard, span, parts in cuts:
            try:
                bodies = (meter.downloading(stream) for _ in parts)
                if not self._put_shard(commit.shards[shard], parts, bodies, vector):
                    damaged[shard] = span
            except MissingKey as error:
                raise CannotReduce(None, f"expected an object {error}, found none") from None
        for shard, span in damaged.items():
            self._read_shard_again(plan, commit, shard, span, vector)

    def _put_shard(
        self, digest: str, parts: Sequence[Span], bodies: Iterator[bytes], vector: Tensor
    ) -> bool:
        """Decode a shard into its place in ``vector`` (n,); whether its bytes have ``digest``."""
        found = ContentDigest()
        is_whole = True
        for part, data in zip(parts, bodies, strict=True):
            found.update(memoryview(data))
            try:
                vector[part.start : part.stop] = decode_body(data, part.numel, self._reduced)
            except BadPayload:
                is_whole = False
        return is_whole and found.hexdigest() == digest

    def _read_shard_again(
        self, plan: Plan, commit: Commit, shard: int, span: Span, vector: Tensor
    ) -> None:
        """A shard that was read damaged: read it again, a bounded number of times.
        Raises :class:`CannotReduce`."""
        digest = commit.shards[shard]
        key = keys.reduced_shard(plan.round, shard, digest)
        parts = self._parts(vector.numel(), span, self._reduced)
        for _ in range(READS - 1):
            log.warning("%s: expected its digest, found another; it is read again", key)
            bodies = (self._store.get_range(key, *self._range(part, span)) for part in parts)
            try:
                if self._put_shard(digest, parts, bodies, vector):
                    return
            except MissingKey as error:
                raise CannotReduce(None, f"expected an object {error}, found none") from None
        raise CannotReduce(None, f"{key} is damaged: expected its digest, found another")

    def _range(self, part: Span, shard: Span) -> tuple[int, int]:
        start = self._reduced.encoded_bytes(part.start - shard.start)
        return start, self._reduced.encoded_bytes(part.numel)

    # -- the sum itself --------------------------------------------------------------------------

    def _reduce(
        self,
        plan: Plan,
        slots: Sequence[Slot],
        span: Span,
        own: Own | None,
        meter: Meter,
        vector: Tensor,
    ) -> None:
        """Write the merged mean of ``span``, passed through the reduced codec, into its place in
        ``vector`` (n,) fp32."""
        meter.timed(lambda: self._sum(plan, slots, span, own, meter, vector))

    def _sum(
        self,
        plan: Plan,
        slots: Sequence[Slot],
        span: Span,
        own: Own | None,
        meter: Meter,
        vector: Tensor,
    ) -> None:
        numel = vector.numel()
        total = WeightedSum(vector[span.start : span.stop])
        parts = self._parts(numel, span, self._codec)
        mine = [own is not None and own.made(c) for c in plan.contributions]
        stream = read_parts(
            self._store,
            (
                self._payload_range(plan, planned, part)
                for part in parts
                for planned, is_mine in zip(plan.contributions, mine, strict=True)
                if not is_mine
            ),
            in_flight=IN_FLIGHT,
        )
        for part in parts:
            for planned, is_mine in zip(plan.contributions, mine, strict=True):
                if is_mine:
                    assert own is not None
                    pieces = self._own_part(own, part, numel)
                else:
                    pieces = self._read_part(plan, planned, part, numel, stream, meter)
                for where, piece in pieces:
                    self._add(total, slots, span, where, piece, planned)
        self._through_codec(total.total)

    def _payload_range(self, plan: Plan, planned: PlannedContribution, part: Span) -> Range:
        key = keys.contribution_payload(plan.round, planned.replica, planned.incarnation)
        start, size_bytes = self._bytes(part, since=0)
        return key, HEADER_BYTES + start, size_bytes

    def _bytes(self, span: Span, *, since: int) -> tuple[int, int]:
        """Where ``span`` lies in a body that begins with element ``since``, and its size."""
        start = self._codec.encoded_bytes(span.start) - self._codec.encoded_bytes(since)
        return start, self._codec.encoded_bytes(span.numel)

    def _read_part(
        self,
        plan: Plan,
        planned: PlannedContribution,
        part: Span,
        numel: int,
        stream: Iterator[bytes],
        meter: Meter,
    ) -> Iterator[tuple[Span, Tensor]]:
        try:
            data = memoryview(meter.downloading(stream))
        except MissingKey as error:
            raise CannotReduce(planned.replica, f"expected an object {error}, found none") from None
        for where in slices(part, numel):
            start, size_bytes = self._bytes(where, since=part.start)
            try:
                piece = self._decoded(data[start : start + size_bytes], where, planned, numel)
            except BadPayload as error:
                piece = self._read_slice_again(plan, planned, where, numel, error)
            # One number tells: a sum is finite only if every element is (or they cannot be
            # averaged).
            if not bool(torch.isfinite(piece.sum())):
                raise CannotReduce(planned.replica, "expected finite values, found NaN or infinity")
            yield where, piece

    def _decoded(
        self, data: memoryview | bytes, where: Span, planned: PlannedContribution, numel: int
    ) -> Tensor:
        return decode_part(data, where, self._codec, numel=numel, checksums=planned.checksums)

    def _read_slice_again(
        self,
        plan: Plan,
        planned: PlannedContribution,
        where: Span,
        numel: int,
        error: BadPayload,
    ) -> Tensor:
        """A slice that was read damaged: the connection may have spoilt it, and then the next read
        is right. Raises :class:`CannotReduce` after a bounded number of reads."""
        key, start, size_bytes = self._payload_range(plan, planned, where)
        for _ in range(READS - 1):
            log.warning("%s: %s; it is read again", key, error)
            try:
                data = self._store.get_range(key, start, size_bytes)
                return self._decoded(data, where, planned, numel)
            except MissingKey as gone:
                reason = f"expected an object {gone}, found none"
                raise CannotReduce(planned.replica, reason) from None
            except BadPayload as again:
                error = again
        raise CannotReduce(planned.replica, f"{error} in {key}")

    def _own_part(self, own: Own, part: Span, numel: int) -> Iterator[tuple[Span, Tensor]]:
        for where in slices(part, numel):
            yield where, own.decoded(where, self._codec)

    def _add(
        self,
        total: WeightedSum,
        slots: Sequence[Slot],
        span: Span,
        part: Span,
        vector: Tensor,
        planned: PlannedContribution,
    ) -> None:
        offset = part.start - span.start
        if self._settings.merge == "mean":
            total.add(offset, vector, planned.weight)
            return
        for index, where in overlaps(slots, slots[0].offset, part.start, part.numel):
            piece = vector[where.start - part.start : where.stop - part.start]
            weight = _direction_weight(planned, index, slots[index])
            total.add(where.start - span.start, piece, weight)

    def _through_codec(self, vector: Tensor) -> None:
        if self._reduced.name != "fp32":
            for start in range(0, vector.numel(), SLICE):
                piece = vector[start : start + SLICE]
                piece.copy_(self._reduced.decode(self._reduced.encode(piece), piece.numel()))

    def _finish(self, plan: Plan, slots: Sequence[Slot], vector: Tensor) -> None:
        """RDA: what was summed are directions; give each tensor the mean of the lengths."""
        if self._settings.merge == "mean":
            return
        first = slots[0].offset
        rescale(
            vector,
            [
                (
                    Span(slot.offset - first, slot.stop - first),
                    sum(c.weight * c.norms[index] for c in plan.contributions),
                )
                for index, slot in enumerate(slots)
                if not slot.embedding
            ],
        )

    def _parts(self, numel: int, span: Span, codec: Codec) -> list[Span]:
        block = block_elements(numel)
        return part_spans(span, block=block, block_bytes=codec.encoded_bytes(block))

    # -- either ----------------------------------------------------------------------------------

    def committed(
        self,
        plan: Plan,
        commit: Commit,
        slots: Sequence[Slot],
        own: Own | None,
        meter: Meter,
        *,
        vector: Tensor | None = None,
        done: Mapping[int, str] | None = None,
    ) -> Merged:
        """What a commit applies, by whatever plan it was made; ``vector`` and ``done`` are of
        shards that were reduced here. Raises :class:`CannotReduce`."""
        if plan.mode == GATHER:
            return self.gather(plan, slots, own, meter)
        vector = new_fragment(slots) if vector is None else vector
        try:
            return self.collect(plan, commit, slots, meter, vector, done or {})
        except CannotReduce as error:
            log.warning("round %d: %s; its payloads are reduced here instead", plan.round, error)
            return self._instead_of_shards(plan, commit, slots, own, meter, vector)

    def _instead_of_shards(
        self,
        plan: Plan,
        commit: Commit,
        slots: Sequence[Slot],
        own: Own | None,
        meter: Meter,
        vector: Tensor,
    ) -> Merged:
        """What the shards held, reduced from the payloads that they were made of.
        Raises :class:`CannotReduce`."""
        self._reduce(plan, slots, Span(0, vector.numel()), own, meter, vector)
        for shard, span in enumerate(shard_spans(vector.numel(), len(plan.owners))):
            found = ContentDigest()
            for part in self._parts(vector.numel(), span, self._reduced):
                found.update(raw(self._reduced.encode(vector[part.start : part.stop])))
            if found.hexdigest() != commit.shards[shard]:
                raise CannotReduce(
                    None,
                    f"expected digest {commit.shards[shard]} of shard {shard}, "
                    f"found {found.hexdigest()} from the payloads",
                )
        self._finish(plan, slots, vector)
        return Merged(vector=vector)


def new_fragment(slots: Sequence[Slot]) -> Tensor:
    """Room for a fragment, (n,) fp32 on the CPU; memory is taken where it is written."""
    return torch.empty(slots[-1].stop - slots[0].offset, dtype=torch.float32)


def _direction_weight(planned: PlannedContribution, index: int, slot: Slot) -> float:
    """RDA's first half: a unit vector counts by the contribution's weight; embeddings by mean."""
    if slot.embedding:
        return planned.weight
    norm = planned.norms[index]
    return planned.weight / norm if norm > SMALLEST_NORM else 0.0
