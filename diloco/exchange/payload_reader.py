"""Reads and verifies the payloads of a planned round, slice by slice.

A payload that is missing, damaged, foreign or not finite raises :class:`CannotReduce`, which names
its replica; the round is then void. A replica does not read its own contribution: it encodes it
again from the gradient, or keeps the payload if that is much smaller.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from diloco.codecs import Codec
from diloco.exchange.checked_blocks import BadPayload, CheckedBlocks
from diloco.exchange.payload import PayloadInfo, blocks_of, object_range, slices
from diloco.exchange.timings import Timings
from diloco.protocol import keys
from diloco.protocol.blocks import (
    MAX_SLICES,
    Span,
    block_elements,
    part_spans,
    slice_count,
    slice_spans,
)
from diloco.protocol.parallel_reads import ExpectedReads, Parts, Range, read_parts
from diloco.protocol.reading import READS
from diloco.protocol.records import Identity, Plan, PlannedContribution
from diloco.store.base import MissingKey, Store

log = logging.getLogger(__name__)

REPAIR_S, LONGEST_REPAIR_S = 2.0, 30.0
"""Shortest and longest pause before the last read of a damaged slice. Its writer reads the payload
back when it has written its record, and uploads a damaged one again, which takes the longer the
larger it is."""
REPAIR_BYTES_PER_S = 80e6


class CannotReduce(Exception):
    """A planned payload is missing or does not match the plan, so the round must be void.

    ``replica`` is the payload's writer; None for a reduced shard.
    """

    def __init__(self, replica: int | None, reason: str) -> None:
        source = f"payload of replica {replica}" if replica is not None else "reduced shard"
        super().__init__(f"{source}: {reason}")
        self.replica = replica
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Own:
    """This replica's contribution: its writer, its payload's digest and the encoded ``vector``
    (n,) fp32, with the payload's ``body`` if it is small. ``start`` is the vector's first element
    in the fragment, above 0 on a rank that holds a slice. ``ahead`` reads the other payloads that
    the plan is expected to name.

    A planned contribution is this one only if identity and digest agree, because the writer of a
    record can copy another record's digest.
    """

    identity: Identity
    digest: str
    vector: Tensor
    body: Tensor | None = None
    start: int = 0
    ahead: ExpectedReads | None = None

    def matches(self, planned: PlannedContribution) -> bool:
        """Return whether ``planned`` is this contribution."""
        identity = Identity(replica=planned.replica, incarnation=planned.incarnation)
        return (identity, planned.digest) == (self.identity, self.digest)

    def decoded(self, where: Span, codec: Codec) -> Tensor:
        """Return the elements ``where`` (whole blocks), fp32, as other replicas decode them."""
        first = where.start - self.start
        if self.body is None:
            body = codec.encode(self.vector[first : first + where.numel])
        else:
            start = codec.encoded_bytes(first)
            body = self.body[start : start + codec.encoded_bytes(where.numel)]
        return codec.decode(body, where.numel)


def codec_parts(span: Span, numel: int, codec: Codec) -> list[Span]:
    """Return the parts of ``span`` in a fragment of ``numel`` elements encoded with ``codec``."""
    block = block_elements(numel)
    return part_spans(span, block=block, block_bytes=codec.encoded_bytes(block))


class PayloadReader:
    """The payloads of one plan, whose fragment has ``numel`` elements."""

    def __init__(
        self,
        store: Store,
        codec: Codec,
        plan: Plan,
        numel: int,
        *,
        timings: Timings,
        own: Own | None = None,
    ) -> None:
        self._store = store
        self._codec = codec
        self._plan = plan
        self._numel = numel
        self._timings = timings
        self._own = own

    def pieces(self, *spans: Span) -> Generator[tuple[PlannedContribution, Span, Tensor]]:
        """Yield (contribution, elements, values) of every contribution in ``spans`` (whole blocks),
        one span after the other: part by part, in each part the contributions in the plan's order,
        in slices.

        Values are (slice,) fp32 on the CPU and finite. Raises :class:`CannotReduce`. Callers close
        it.
        """
        with contextlib.closing(self._stream(spans)) as stream:
            for part in self._parts(spans):
                for planned in self._plan.contributions:
                    own = self._is_own(planned)
                    pieces = self._own_part(part) if own else self._read_part(planned, part, stream)
                    for where, piece in pieces:
                        yield planned, where, piece

    def ranges(self, *spans: Span) -> list[Range]:
        """Return what :meth:`pieces` reads, in this order. Raises :class:`CannotReduce`."""
        others = [one for one in self._plan.contributions if not self._is_own(one)]
        return [self._range(planned, part) for part in self._parts(spans) for planned in others]

    def _stream(self, spans: Sequence[Span]) -> Parts:
        """Read the other payloads, or take the reads that have begun before the plan."""
        ranges = self.ranges(*spans)
        begun = self._own.ahead.parts_of(ranges) if self._own and self._own.ahead else None
        return begun or read_parts(self._store, ranges)

    def _is_own(self, planned: PlannedContribution) -> bool:
        return self._own is not None and self._own.matches(planned)

    def _parts(self, spans: Sequence[Span]) -> list[Span]:
        """Return the parts of ``spans``, cut where a payload's next object begins. Raises
        :class:`CannotReduce` for a number of objects, or an incarnation, that no payload has."""
        return [part for span in spans for part in self._parts_of(span)]

    def _parts_of(self, span: Span) -> list[Span]:
        cuts = {span.start, span.stop}
        for planned in self._plan.contributions:
            if not keys.is_incarnation(planned.incarnation):
                raise CannotReduce(
                    planned.replica, f"found incarnation {planned.incarnation!r}"[:200]
                )
            if not 1 <= planned.slices <= slice_count(self._numel, MAX_SLICES):
                raise CannotReduce(planned.replica, f"found {planned.slices} slices"[:200])
            starts = {held.start for held in slice_spans(self._numel, planned.slices)}
            cuts |= {start for start in starts if span.start < start < span.stop}
        return [
            part
            for start, stop in pairwise(sorted(cuts))
            for part in codec_parts(Span(start, stop), self._numel, self._codec)
        ]

    def _range(self, planned: PlannedContribution, span: Span) -> Range:
        blocks = self._blocks_of(planned)
        index, start = object_range(blocks, planned.slices, span)
        key = keys.contribution_payload(
            self._plan.round, planned.replica, planned.incarnation, index
        )
        return key, start, blocks.size_bytes(span.numel)

    def _blocks_of(self, planned: PlannedContribution) -> CheckedBlocks:
        """Return the layout of a payload, with the checksums that the plan accepts."""
        info = PayloadInfo(
            round=self._plan.round,
            fragment=self._plan.fragment,
            replica=planned.replica,
            incarnation=planned.incarnation,
            codec=self._codec.name,
            numel=self._numel,
            attempt=planned.attempt,
        )
        return blocks_of(info, self._codec)

    def _own_part(self, part: Span) -> Iterator[tuple[Span, Tensor]]:
        assert self._own is not None
        for where in slices(part, self._numel):
            yield where, self._own.decoded(where, self._codec)

    def _read_part(
        self, planned: PlannedContribution, part: Span, stream: Iterator[bytes]
    ) -> Iterator[tuple[Span, Tensor]]:
        try:
            with self._timings.measure("download"):
                data = memoryview(next(stream))
        except MissingKey as error:
            raise CannotReduce(planned.replica, f"expected an object {error}, found none") from None
        blocks = self._blocks_of(planned)
        for where in slices(part, self._numel):
            start = blocks.size_bytes(where.start) - blocks.size_bytes(part.start)
            try:
                piece = blocks.decode(data[start : start + blocks.size_bytes(where.numel)], where)
            except BadPayload as error:
                piece = self._read_slice_again(planned, where, error)
            # A sum is finite only if every element is.
            if not bool(torch.isfinite(piece.sum())):
                raise CannotReduce(planned.replica, "expected finite values, found NaN or infinity")
            yield where, piece

    def _read_slice_again(
        self, planned: PlannedContribution, where: Span, error: BadPayload
    ) -> Tensor:
        """Read a slice again, because it can have been damaged in transfer.

        Raises :class:`CannotReduce` after :data:`~diloco.protocol.reading.READS` failed reads.
        """
        blocks = self._blocks_of(planned)
        key, start, size_bytes = self._range(planned, where)
        for read in range(1, READS):
            log.warning("%s: %s; reading it again", key, error)
            if read == READS - 1:
                upload_s = blocks.size_bytes(self._numel) / REPAIR_BYTES_PER_S
                self._timings.clock.sleep(min(LONGEST_REPAIR_S, REPAIR_S + upload_s))
            try:
                return blocks.decode(self._store.get_range(key, start, size_bytes), where)
            except MissingKey as missing:
                reason = f"expected an object {missing}, found none"
                raise CannotReduce(planned.replica, reason) from None
            except BadPayload as again:
                error = again
        raise CannotReduce(planned.replica, f"{error} in {key}")
