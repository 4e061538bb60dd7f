"""Reducing a planned round: read slices of payloads, verify them, sum in fp32 in rank order.

One mechanism serves all three plans. :meth:`Reducer.sum_of` merges any span of whole blocks; in a
*gathered* round every replica does that to the whole fragment, in a *sharded* one each owner to
its shard, which it stores for the others, and a *syncer* to a single shard that is all. The mean
passes through the reduced codec in every plan, and encoding is done block by block, so all three
give the same bits (I3). A payload that is missing, damaged, foreign or not finite is refused by
name; the round is then void.

Memory: the merged fragment, and parts on their way; what this replica itself contributed is
encoded anew from its gradient instead of being kept twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.codecs import Codec, get_codec, reduced_codec
from diloco.fragments import Slot
from diloco.outer import ContentDigest, WeightedSum, content_digest, digest, rescale
from diloco.rendezvous import keys
from diloco.rendezvous.clock import Clock
from diloco.rendezvous.geometry import (
    HEADER_BYTES,
    Span,
    block_elements,
    part_spans,
    shard_spans,
)
from diloco.rendezvous.records import Commit, Plan, PlannedContribution
from diloco.rendezvous.settings import GroupSettings
from diloco.rendezvous.store import PART_BYTES, MissingKey, Store
from diloco.rendezvous.transfer import Range, read_parts
from diloco.rendezvous.view import GATHER
from diloco.wire import BadPayload, decode_body, decode_part, overlaps, raw

IN_FLIGHT = 6
"""Ranged reads ahead of the one that is being summed."""


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
    """What this replica contributed: the digest of its payload and the vector it encoded."""

    digest: str
    vector: Tensor


class Meter:
    """Splits a reduction's time into waiting for bytes and working on them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.download_s = 0.0
        self.total_s = 0.0

    def downloading(self, parts: Iterator[bytes]) -> bytes:
        start_s = self._clock.monotonic()
        try:
            return next(parts)
        finally:
            self.download_s += self._clock.monotonic() - start_s

    def timed(self, operation: Callable[[], Tensor]) -> Tensor:
        start_s = self._clock.monotonic()
        try:
            return operation()
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
        vector = self.mean_of(plan, slots, Span(0, _numel(slots)), own, meter)
        found = digest(vector)
        self._finish(plan, slots, vector)
        return Merged(vector=vector, digest=found)

    # -- sharded ---------------------------------------------------------------------------------

    def store_shard(
        self, plan: Plan, shard: int, slots: Sequence[Slot], own: Own | None, meter: Meter
    ) -> str:
        """Reduce one shard and store it; returns its digest. Raises :class:`CannotReduce`."""
        numel = _numel(slots)
        span = shard_spans(numel, len(plan.owners))[shard]
        vector = self.mean_of(plan, slots, span, own, meter)
        body = raw(self._reduced.encode(vector)) if span.numel else memoryview(b"")
        found = content_digest(body)
        parts = range(0, max(1, len(body)), PART_BYTES)
        self._store.put_stream(
            keys.reduced_shard(plan.round, shard, found),
            lambda: (body[start : start + PART_BYTES] for start in parts),
        )
        return found

    def collect(self, plan: Plan, commit: Commit, slots: Sequence[Slot], meter: Meter) -> Merged:
        """Put a fragment together from its reduced shards. Raises :class:`CannotReduce`."""
        numel = _numel(slots)
        vector = torch.empty(numel, dtype=torch.float32)
        meter.timed(lambda: self._collect(plan, commit, vector, meter))
        self._finish(plan, slots, vector)
        return Merged(vector=vector)

    def _collect(self, plan: Plan, commit: Commit, vector: Tensor, meter: Meter) -> Tensor:
        cuts = [
            (shard, span, self._parts(vector.numel(), span, self._reduced))
            for shard, span in enumerate(shard_spans(vector.numel(), len(plan.owners)))
        ]
        requests = (
            (keys.reduced_shard(plan.round, shard, commit.shards[shard]), *self._range(part, span))
            for shard, span, parts in cuts
            for part in parts
        )
        stream = read_parts(self._store, requests, in_flight=IN_FLIGHT)
        for shard, _, parts in cuts:
            found = ContentDigest()
            for part in parts:
                try:
                    data = meter.downloading(stream)
                except MissingKey as error:
                    raise CannotReduce(None, f"expected an object {error}, found none") from None
                _update(found, data)
                try:
                    piece = decode_body(data, part.numel, self._reduced)
                except BadPayload as error:
                    raise CannotReduce(None, f"shard {shard}: {error}") from None
                vector[part.start : part.stop] = piece
            if found.hexdigest() != commit.shards[shard]:
                raise CannotReduce(
                    None,
                    f"expected digest {commit.shards[shard]} of shard {shard}, "
                    f"found {found.hexdigest()}",
                )
        return vector

    def _range(self, part: Span, shard: Span) -> tuple[int, int]:
        start = self._reduced.encoded_bytes(part.start - shard.start)
        return start, self._reduced.encoded_bytes(part.numel)

    # -- the sum itself --------------------------------------------------------------------------

    def mean_of(
        self, plan: Plan, slots: Sequence[Slot], span: Span, own: Own | None, meter: Meter
    ) -> Tensor:
        """The merged mean of ``span``, passed through the reduced codec: (span.numel,) fp32."""
        return meter.timed(lambda: self._mean_of(plan, slots, span, own, meter))

    def _mean_of(
        self, plan: Plan, slots: Sequence[Slot], span: Span, own: Own | None, meter: Meter
    ) -> Tensor:
        numel = _numel(slots)
        total = WeightedSum(torch.empty(span.numel, dtype=torch.float32))
        parts = self._parts(numel, span, self._codec)
        mine = [own is not None and own.digest == c.digest for c in plan.contributions]
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
                    vector = self._own_part(own, part, block_elements(numel))
                else:
                    vector = self._read_part(plan, planned, part, numel, stream, meter)
                self._add(total, slots, span, part, vector, planned)
        return self._through_codec(total.total, block_elements(numel))

    def _payload_range(self, plan: Plan, planned: PlannedContribution, part: Span) -> Range:
        key = keys.contribution_payload(plan.round, planned.replica, planned.incarnation)
        start = HEADER_BYTES + self._codec.encoded_bytes(part.start)
        return key, start, self._codec.encoded_bytes(part.numel)

    def _read_part(
        self,
        plan: Plan,
        planned: PlannedContribution,
        part: Span,
        numel: int,
        stream: Iterator[bytes],
        meter: Meter,
    ) -> Tensor:
        try:
            data = meter.downloading(stream)
            vector = decode_part(data, part, self._codec, numel=numel, checksums=planned.checksums)
        except MissingKey as error:
            raise CannotReduce(planned.replica, f"expected an object {error}, found none") from None
        except BadPayload as error:
            raise CannotReduce(planned.replica, str(error)) from None
        # One number tells: a sum is finite only if every element is (or they cannot be averaged).
        if not bool(torch.isfinite(vector.sum())):
            raise CannotReduce(planned.replica, "expected finite values, found NaN or infinity")
        return vector

    def _own_part(self, own: Own, part: Span, block: int) -> Tensor:
        if self._codec.name == "fp32":
            return own.vector[part.start : part.stop]
        vector = torch.empty(part.numel, dtype=torch.float32)
        for start in range(part.start, part.stop, block):
            piece = own.vector[start : min(start + block, part.stop)]
            decoded = self._codec.decode(self._codec.encode(piece), piece.numel())
            vector[start - part.start : start - part.start + piece.numel()] = decoded
        return vector

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

    def _through_codec(self, vector: Tensor, block: int) -> Tensor:
        if self._reduced.name != "fp32":
            for start in range(0, vector.numel(), block):
                piece = vector[start : start + block]
                piece.copy_(self._reduced.decode(self._reduced.encode(piece), piece.numel()))
        return vector

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
        self, plan: Plan, commit: Commit, slots: Sequence[Slot], own: Own | None, meter: Meter
    ) -> Merged:
        """What a commit applies, by whatever plan it was made. Raises :class:`CannotReduce`."""
        if plan.mode == GATHER:
            return self.gather(plan, slots, own, meter)
        return self.collect(plan, commit, slots, meter)


def _direction_weight(planned: PlannedContribution, index: int, slot: Slot) -> float:
    """RDA's first half: a unit vector counts by the contribution's weight; embeddings by mean."""
    if slot.embedding:
        return planned.weight
    norm = planned.norms[index]
    return planned.weight / norm if norm > 0 else 0.0


def _numel(slots: Sequence[Slot]) -> int:
    return slots[-1].stop - slots[0].offset


def _update(found: ContentDigest, data: bytes) -> None:
    found.update(memoryview(data))
