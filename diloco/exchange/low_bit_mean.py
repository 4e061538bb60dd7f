"""The low-bit mean: a shard's quantised mean, and the residual that enters the next one.

A shard's object is the encoded mean, then for each block the encoded residual (mean minus decoded
mean) and its checksum. All replicas apply the decoded mean. The residual is read only by the
reducer of the same elements in the fragment's next round, also if the shards have other boundaries
then. It is a function of stored objects, so any process can reduce any shard.

The residual's own encoding loses less than a hundredth of it; this is not carried over.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from diloco.codecs import Codec, get_codec
from diloco.exchange.checked_blocks import BadPayload, CheckedBlocks, raw
from diloco.exchange.payload import slices
from diloco.exchange.payload_reader import CannotReduce, codec_parts
from diloco.exchange.timings import Timings
from diloco.protocol import keys
from diloco.protocol.blocks import Span, shard_spans
from diloco.protocol.parallel_reads import Range, read_parts
from diloco.protocol.payload_size import RESIDUAL_CODEC
from diloco.protocol.reading import READS, Damaged
from diloco.protocol.records import Commit
from diloco.protocol.settings import GroupSettings
from diloco.store.base import PART_BYTES, MissingKey, Store

log = logging.getLogger(__name__)


class LowBitShard:
    """Encodes the shard ``span`` of a fragment of ``numel`` elements.

    ``vector`` (span,) fp32, the mean with the previous residual, is replaced by the decoded mean.
    """

    def __init__(self, codec: Codec, vector: Tensor, span: Span, *, numel: int) -> None:
        self._codec = codec
        self._span = span
        self._residual = CheckedBlocks(get_codec(RESIDUAL_CODEC), numel)
        self._mean_bytes = codec.encoded_bytes(span.numel)
        self.size_bytes = self._mean_bytes + self._residual.size_bytes(span.numel)
        self._body = torch.empty(self.size_bytes, dtype=torch.uint8)
        for where in slices(span, numel):
            self._encode(vector[where.start - span.start : where.stop - span.start], where)

    def mean(self, part: Span) -> memoryview:
        """Return the encoded mean of ``part``, whole blocks of the fragment."""
        start = self._codec.encoded_bytes(part.start - self._span.start)
        return raw(self._body[start : start + self._codec.encoded_bytes(part.numel)])

    @property
    def bodies(self) -> tuple[Tensor, Tensor]:
        """The encoded mean and residual, 1-d uint8."""
        return self._body[: self._mean_bytes], self._body[self._mean_bytes :]

    def parts(self) -> Iterator[memoryview]:
        """Yield the object in parts of :data:`~diloco.store.base.PART_BYTES`; an empty one for a
        shard without elements."""
        for start in range(0, max(1, len(self._body)), PART_BYTES):
            yield raw(self._body[start : start + PART_BYTES])

    @torch.no_grad()
    def _encode(self, piece: Tensor, where: Span) -> None:
        before = where.start - self._span.start
        start = self._codec.encoded_bytes(before)
        body = self._body[start : start + self._codec.encoded_bytes(piece.numel())]
        self._codec.encode(piece, body)
        decoded = self._codec.decode(body, piece.numel())
        residual = piece - decoded
        piece.copy_(decoded)
        start = self._mean_bytes + self._residual.size_bytes(before)
        encoded = self._body[start : start + self._residual.size_bytes(where.numel)]
        self._residual.encode(residual, where, encoded)


class ResidualReader:
    """Reads what the previous round of a fragment of ``numel`` elements cut off.

    ``commit_of`` returns the commit of a round, or raises
    :class:`~diloco.protocol.reading.Damaged`.
    """

    def __init__(
        self,
        store: Store,
        settings: GroupSettings,
        round: int,
        numel: int,
        *,
        commit_of: Callable[[int], Commit | None],
        timings: Timings,
    ) -> None:
        self._store = store
        self._settings = settings
        self._round = round
        self._numel = numel
        self._commit_of = commit_of
        self._timings = timings
        self._mean = get_codec(settings.mean_codec)
        self._residual = CheckedBlocks(get_codec(RESIDUAL_CODEC), numel)

    def pieces(self, span: Span) -> Iterator[tuple[Span, Tensor]]:
        """Yield (elements, values) of the residual in ``span`` (whole blocks), part by part.

        Nothing without a residual. Values are fp32 on the CPU and finite. Raises
        :class:`CannotReduce`.
        """
        previous = self._previous()
        if previous is None:
            return
        ranges = list(self._ranges(previous, span))
        with contextlib.closing(read_parts(self._store, (where for _, where in ranges))) as stream:
            for part, where in ranges:
                try:
                    with self._timings.measure("download"):
                        data = next(stream)
                    yield part, self._verified(data, part, where)
                except MissingKey as error:
                    raise CannotReduce(
                        None, f"expected a residual in object {error}, found none"
                    ) from None

    def _previous(self) -> Commit | None:
        """Return the commit of the fragment's previous round that is not void."""
        step, reach = self._settings.num_fragments, self._settings.residual_rounds
        for round in range(self._round - step, max(0, self._round - reach - 1), -step):
            try:
                commit = self._commit_of(round)
            except Damaged as error:
                raise CannotReduce(None, str(error)) from None
            if commit is None:
                raise CannotReduce(None, f"expected the commit of round {round}, found none")
            if not commit.void:
                return commit
        return None

    def _ranges(self, previous: Commit, span: Span) -> Iterator[tuple[Span, Range]]:
        """Yield the parts of ``span`` and their places in the shards of the previous round."""
        # No shards: a gathered round applied the exact mean.
        for shard, stored in enumerate(shard_spans(self._numel, len(previous.shards))):
            common = Span(max(span.start, stored.start), min(span.stop, stored.stop))
            if common.numel <= 0:
                continue
            key = keys.reduced_shard(previous.round, shard, previous.shards[shard])
            mean_bytes = self._mean.encoded_bytes(stored.numel)
            for part in codec_parts(common, self._numel, self._residual.codec):
                before = self._residual.size_bytes(part.start - stored.start)
                yield part, (key, mean_bytes + before, self._residual.size_bytes(part.numel))

    def _verified(self, data: bytes, part: Span, where: Range) -> Tensor:
        """Decode a part, reading it again if it is damaged. Raises :class:`CannotReduce`."""
        for read in range(READS):
            try:
                return self._decoded(memoryview(data), part)
            except BadPayload as error:
                log.warning("residual in %s: %s", where[0], error)
                reason = str(error)
            if read < READS - 1:
                data = self._store.get_range(*where)
        raise CannotReduce(None, f"residual in {where[0]}: {reason}")

    def _decoded(self, data: memoryview, part: Span) -> Tensor:
        vector = self._residual.decode(data, part)
        # A sum is finite only if every element is.
        if not bool(torch.isfinite(vector.sum())):
            raise BadPayload("expected finite values, found NaN or infinity")
        return vector
