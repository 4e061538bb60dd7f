"""Reads the stored mean of a round: its reduced shards, or what one rank needs of them.

The digest of a shard covers its encoded mean in chunks of 4 MiB, counted from the start of each
part. A rank that holds a slice of the fragment reads the chunks that have an element of the slice.
The chunks of all ranks together have the shard's digest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from diloco.codecs import Codec
from diloco.exchange.checked_blocks import BadPayload, decode_body
from diloco.exchange.payload_reader import CannotReduce, codec_parts
from diloco.exchange.timings import Timings
from diloco.model.outer_optimizer import DIGEST_CHUNK, ContentDigest, chunk_digests
from diloco.protocol import keys
from diloco.protocol.blocks import Span, shard_spans
from diloco.protocol.parallel_reads import ExpectedReads, Range, read_parts
from diloco.protocol.records import Plan
from diloco.store.base import MissingKey, Store

DIGEST_BYTES = 16
"""Size of the digest of a chunk."""


@dataclass(frozen=True)
class Chunks:
    """Digests of adjacent chunks of a shard's encoded mean, from number ``first`` on. Empty
    ``digests`` with a ``first`` of -1: the bytes cannot be decoded."""

    first: int
    digests: bytes


def joined_digest(results: Iterable[Chunks]) -> str:
    """Return the digest of a shard from the chunks that the ranks have read; '' if two ranks have
    read different bytes of one chunk, or one cannot decode its own."""
    found: dict[int, bytes] = {}
    for chunks in results:
        if chunks.first < 0:
            return ""
        for start in range(0, len(chunks.digests), DIGEST_BYTES):
            number = chunks.first + start // DIGEST_BYTES
            digest = chunks.digests[start : start + DIGEST_BYTES]
            if found.setdefault(number, digest) != digest:
                return ""
    content = ContentDigest()
    content.update_chunks(b"".join(found[number] for number in sorted(found)))
    return content.hexdigest()


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """The ``elements`` of one part of a shard that are read: ``size_bytes`` from ``start`` in the
    shard's object, of which the encoded elements begin after ``skipped``. ``chunk`` is the number
    of the first chunk."""

    elements: Span
    start: int
    size_bytes: int
    skipped: int
    chunk: int


class MeanReader:
    """The stored mean of one plan, whose fragment has ``numel`` elements, of which this process
    reads the elements ``span``."""

    def __init__(
        self, store: Store, codec: Codec, plan: Plan, numel: int, span: Span, *, timings: Timings
    ) -> None:
        self._store = store
        self._codec = codec
        self._round = plan.round
        self._numel = numel
        self._span = span
        self._timings = timings
        self._ahead: ExpectedReads | None = None
        self.shards = shard_spans(numel, len(plan.owners))

    def parts(self, shard: int) -> list[Span]:
        """Return the parts of a shard."""
        return codec_parts(self.shards[shard], self._numel, self._codec)

    def expect(self, digests: Mapping[int, str]) -> None:
        """Begin to read shards that a commit is expected to name, once for each plan."""
        if self._ahead is None:
            requests, clock = self._requests(digests), self._timings.clock
            self._ahead = ExpectedReads(self._store, requests, clock=clock, polls=None)

    def close(self) -> None:
        """End the reads that have begun."""
        if self._ahead is not None:
            self._ahead.close()

    def read(
        self, digests: Mapping[int, str], merged: Tensor, *, early: bool = False
    ) -> dict[int, Chunks]:
        """Decode shards into ``merged`` (span,) fp32; return the chunks that were read of each.

        Uses the reads that have begun, unless it is called ``early``, before the commit. Raises
        :class:`CannotReduce` for a missing object.
        """
        requests = self._requests(digests)
        begun = self._ahead.parts_of(requests) if self._ahead and not early else None
        stream = begun or read_parts(self._store, requests)
        try:
            with contextlib.closing(stream):
                return {shard: self._read_shard(shard, stream, merged) for shard in digests}
        except MissingKey as error:
            raise CannotReduce(None, f"expected an object {error}, found none") from None

    def _read_shard(self, shard: int, stream: Iterator[bytes], merged: Tensor) -> Chunks:
        found, first, is_valid = b"", 0, True
        for index, piece in enumerate(self._pieces(shard)):
            with self._timings.measure("download"):
                data = memoryview(next(stream))
            first = first if index else piece.chunk
            found += chunk_digests(data)
            where = piece.elements
            body = data[piece.skipped : piece.skipped + self._codec.encoded_bytes(where.numel)]
            out = merged[where.start - self._span.start : where.stop - self._span.start]
            try:
                decode_body(body, where.numel, self._codec, out)
            except BadPayload:
                is_valid = False
        return Chunks(first, found) if is_valid else Chunks(-1, b"")

    def _requests(self, digests: Mapping[int, str]) -> list[Range]:
        """Return the ranges of shards, in order."""
        return [
            (keys.reduced_shard(self._round, shard, digest), piece.start, piece.size_bytes)
            for shard, digest in digests.items()
            for piece in self._pieces(shard)
        ]

    def _pieces(self, shard: int) -> Iterator[_Piece]:
        encoded_bytes, chunk = self._codec.encoded_bytes, 0
        for part in self.parts(shard):
            low, high = max(part.start, self._span.start), min(part.stop, self._span.stop)
            size_bytes = encoded_bytes(part.numel)
            if low < high:
                before = encoded_bytes(low - part.start)
                start = before // DIGEST_CHUNK * DIGEST_CHUNK
                stop = -(-encoded_bytes(high - part.start) // DIGEST_CHUNK) * DIGEST_CHUNK
                yield _Piece(
                    elements=Span(low, high),
                    start=encoded_bytes(part.start - self.shards[shard].start) + start,
                    size_bytes=min(size_bytes, stop) - start,
                    skipped=before - start,
                    chunk=chunk + start // DIGEST_CHUNK,
                )
            chunk += -(-size_bytes // DIGEST_CHUNK)
