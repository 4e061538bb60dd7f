"""Reduces a planned round: sums slices of the payloads in fp32, in the plan's order.

All three reduce plans share one mechanism, which merges any span of whole blocks. In a *gathered*
round every replica reduces the whole fragment; in a *sharded* round each owner reduces its shard
and stores it for the others; a *syncer* reduces a single shard, the whole fragment. The mean passes
through the reduced codec in every plan, and encoding works block by block, so all plans produce the
same bits (invariant I3). With a low-bit mean (:mod:`diloco.exchange.low_bit_mean`) this holds for
the plans that store a mean; a gathered round applies the exact one.

Memory: the merged fragment and the parts in transfer. Shards are reduced in place in the merged
fragment, and parts are decoded slice by slice.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from diloco.codecs import get_codec
from diloco.exchange.checked_blocks import CheckedBlocks, raw
from diloco.exchange.cosine import Products, cosine_of, products
from diloco.exchange.low_bit_mean import LowBitShard, ResidualReader
from diloco.exchange.mean_reader import Chunks, MeanReader, joined_digest
from diloco.exchange.payload import SLICE, overlaps
from diloco.exchange.payload_reader import CannotReduce, Own, PayloadReader
from diloco.exchange.timings import Timings
from diloco.model.fragments import Slot
from diloco.model.outer_optimizer import ContentDigest, WeightedSum, digest, rescale
from diloco.protocol import keys
from diloco.protocol.blocks import Span
from diloco.protocol.payload_size import FULL_MEAN, RESIDUAL_CODEC, reduced_codec
from diloco.protocol.reading import READS
from diloco.protocol.records import Commit, Plan, PlannedContribution
from diloco.protocol.round_view import GATHER
from diloco.protocol.settings import GroupSettings
from diloco.store.base import MakeParts, Store
from diloco.store.daemon import DaemonPool

__all__ = ["CannotReduce", "Merged", "Own", "Reduction"]

log = logging.getLogger(__name__)

Listed: TypeAlias = Mapping[int, tuple[str, ...]]
"""The digests of the stored objects by shard."""
NOTHING: Mapping[int, str] = {}
FIRST_PAUSE_S = 0.05
"""Pause after the first listing of other owners' shards; twice as long after each further one."""
SMALLEST_NORM = 1e-30
"""Norm below which a tensor counts as zero in RDA: a weight divided by it can exceed float32."""


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The averaged pseudo-gradient of a round, (n,) fp32 on the CPU.

    ``digest`` is that of a gathered round's mean before RDA scales it to its norms, '' otherwise.
    ``present`` is the sum of the plan's weights, below 1 if a replica is late.
    """

    vector: Tensor
    digest: str = ""
    present: float = 1.0


class Reduction:
    """The reduction of one planned round by one process.

    ``slots`` are the tensors of the round's fragment. ``own`` is this replica's contribution, which
    is not read from the store. ``commit_of`` returns earlier commits, for the residual of a low-bit
    mean. The durations of the phases are added to ``timings``. A rank that holds a slice of the
    fragment reduces only the elements ``span`` of a gathered round.
    """

    def __init__(
        self,
        store: Store,
        settings: GroupSettings,
        plan: Plan,
        slots: Sequence[Slot],
        *,
        timings: Timings,
        commit_of: Callable[[int], Commit | None] = lambda round: None,
        own: Own | None = None,
        span: Span | None = None,
    ) -> None:
        self._store = store
        self._is_mean = settings.merge == "mean"
        self._is_low_bit = settings.mean_codec != FULL_MEAN
        self._plan = plan
        self._slots = slots
        self._timings = timings
        is_exact = self._is_low_bit and plan.mode == GATHER
        self._codec = get_codec(
            "fp32" if is_exact else reduced_codec(settings.codec, settings.mean_codec)
        )
        self._numel = slots[-1].stop - slots[0].offset
        self._span = span or Span(0, self._numel)
        self._own = own
        self._payload_codec = get_codec(settings.codec, topk=settings.topk)
        self._residual: ResidualReader | None = None
        if self._is_low_bit:
            self._residual = ResidualReader(
                store, settings, plan.round, self._numel, commit_of=commit_of, timings=timings
            )
        self._payloads = PayloadReader(
            store,
            self._payload_codec,
            plan,
            self._numel,
            timings=timings,
            own=own,
        )
        self._mean = MeanReader(store, self._codec, plan, self._numel, self._span, timings=timings)
        self._spans = self._mean.shards
        self._vector: Tensor | None = None
        self._reduced_shards: dict[int, str] = {}
        """Digests of the shards in the merged fragment."""

    @property
    def merged(self) -> Tensor:
        """The merged fragment, or slice, (n,) fp32 on the CPU, allocated on first use."""
        if self._vector is None:
            self._vector = torch.empty(self._span.numel, dtype=torch.float32)
        return self._vector

    @property
    def _present(self) -> float:
        return sum(planned.weight for planned in self._plan.contributions)

    def gather(self) -> Merged:
        """Reduce the whole fragment from the payloads. Raises :class:`CannotReduce`."""
        self.gather_span()
        mean_digest = digest(self.merged)
        self._restore_norms()
        return self._result(mean_digest)

    def _result(self, digest: str = "") -> Merged:
        return Merged(vector=self.merged, digest=digest, present=self._present)

    def gather_span(self) -> Tensor:
        """Reduce this process's part of the fragment, without the norms of RDA. Raises
        :class:`CannotReduce`."""
        self._sum(self._span)
        self._through_codec(self.merged)
        return self.merged

    def products(self, merged: Tensor) -> Products:
        """Return the sums for the cosine of this replica's contribution to ``merged``."""
        own = self._own
        assert own is not None
        first = self._span.start
        return products(
            lambda where: own.decoded(
                Span(where.start + first, where.stop + first), self._payload_codec
            ),
            merged,
            numel=self._numel,
        )

    def cosine(self, merged: Merged) -> float | None:
        """Return the cosine of this replica's contribution to the merged mean
        (:mod:`diloco.exchange.cosine`)."""
        with self._timings.measure("reduce"):
            return cosine_of([self.products(merged.vector)])

    def store_shards(
        self, shards: Sequence[int], *, listed: Callable[[], Listed] = dict
    ) -> dict[int, str]:
        """Reduce shards one after the other, and store each while the next one is summed; return
        their hex digests. Raises :class:`CannotReduce`.

        While the last of several shards is stored, those of other owners are read (``listed``
        lists them). The rest is read ahead of the commit once all shards are stored.
        """
        digests: dict[int, str] = {}
        storing: list[Future[None]] = []
        spans = [self._spans[shard] for shard in shards]
        with (
            DaemonPool(1, "store_shard") as pool,
            DaemonPool(1, "read_shards") as readers,
            contextlib.closing(self._payloads.pieces(*spans)) as pieces,
        ):
            for shard, span in zip(shards, spans, strict=True):
                self._sum_pieces(span, pieces)
                digests[shard], make_parts, size_bytes = self._encoded(shard)
                self._reduced_shards[shard] = digests[shard]
                key = keys.reduced_shard(self._plan.round, shard, digests[shard])
                put = partial(self._store.put_stream, key, make_parts, size_bytes=size_bytes)
                storing.append(_in_pool(pool, put))
            for stored in storing[:-1]:
                self._await_stored(stored)
            if len(storing) > 1:
                own = {self._plan.owners[shard] for shard in shards}
                self._read_others(set(self._plan.owners) - own, storing[-1], listed, readers)
            else:
                self._await_stored(storing[-1])
        return digests

    def _read_others(
        self,
        owners: set[int],
        storing: Future[None],
        listed: Callable[[], Listed],
        readers: DaemonPool,
    ) -> None:
        """Read a shard of each of ``owners`` while the last own one is stored (``storing``), and
        begin to read the rest once all are stored. A thread of ``readers`` decodes what is read
        early; this one lists."""
        found: dict[int, str] = {}
        reading = self._read_first(owners, storing, listed, readers, found)
        storing.result()
        pause_s = FIRST_PAUSE_S
        while not self.read_ahead(listed(), but=found) and not reading.done():
            wait([reading], timeout=pause_s)
            pause_s *= 2
        reading.result()

    def _read_first(
        self,
        owners: set[int],
        storing: Future[None],
        listed: Callable[[], Listed],
        readers: DaemonPool,
        found: dict[int, str],
    ) -> Future[None]:
        """Do the first half of :meth:`_read_others`; return the last read, and add the digests of
        its shards to ``found``.

        Owners store their first shards at about the same time. So a first listing that lacks some
        is repeated after a pause, before those that are there are read.
        """
        reading: Future[None] = Future()
        reading.set_result(None)
        pause_s = 0.0
        while not storing.done():
            listing = self._listed_once(listed()).items()
            new = {shard: digest for shard, digest in listing if shard not in found}
            are_all = owners <= {self._plan.owners[shard] for shard in (*found, *new)}
            if new and reading.done() and (pause_s or are_all):
                reading.result()
                found.update(new)
                reading = _in_pool(readers, partial(self._read_early, new))
            pause_s = 2 * pause_s or FIRST_PAUSE_S
            is_complete = are_all and new.keys() <= found.keys()
            # The thread that reads measures its own time.
            with self._timings.measure_rest("upload"):
                wait([storing], timeout=None if is_complete else pause_s)
        return reading

    def _await_stored(self, stored: Future[None]) -> None:
        with self._timings.measure("upload"):
            stored.result()

    def _listed_once(self, reduced: Listed) -> dict[int, str]:
        """Return the digests of the shards that a listing has one version of, and the merged
        fragment none."""
        return {
            shard: digests[0]
            for shard in range(len(self._spans))
            if shard not in self._reduced_shards and len(digests := reduced.get(shard, ())) == 1
        }

    def _read_early(self, digests: Mapping[int, str]) -> None:
        """Read shards into the merged fragment. :meth:`committed` reads those again of which the
        commit names another version, or that cannot be read yet."""
        with (
            contextlib.suppress(CannotReduce),
            self._timings.measure("reduce", excluding="download"),
        ):
            self._read_shards(digests, early=True)

    def read_ahead(self, reduced: Listed, *, but: Mapping[int, str] = NOTHING) -> bool:
        """Begin to read the shards of a listing, if it has one version of each, ``but`` those that
        are being read; return whether it has. A commit of other versions drops the reads."""
        found = [reduced.get(shard, ()) for shard in range(len(self._spans))]
        if any(len(digests) != 1 for digests in found):
            return False
        missing = self._missing_shards([digest for (digest,) in found])
        self.expect({shard: wanted for shard, wanted in missing.items() if shard not in but})
        return True

    def expect(self, digests: Mapping[int, str]) -> None:
        """Begin to read this process's part of the shards that a commit is expected to name."""
        self._mean.expect(digests)

    def close(self) -> None:
        """End the reads that have begun."""
        self._mean.close()

    def committed(self, commit: Commit) -> Merged:
        """Return the mean that ``commit`` applies, from the payloads or from the reduced shards.

        Shards that this process has stored or read are not read again. If a reduced shard cannot be
        read, the payloads are reduced instead. Raises :class:`CannotReduce`.
        """
        if self._plan.mode == GATHER:
            return self.gather()
        self._require_digests(commit)
        try:
            with self._timings.measure("reduce", excluding="download"):
                self._collect(commit)
        except CannotReduce as error:
            log.warning("round %d: %s; reducing its payloads here instead", self._plan.round, error)
            self._reduce_here(commit)
        self._restore_norms()
        return self._result()

    def _require_digests(self, commit: Commit) -> None:
        """Raise :class:`CannotReduce` unless a commit names the reduced object of each shard."""
        named = [key for key in enumerate(commit.shards) if _is_key(self._plan.round, *key)]
        if len(named) != len(commit.shards) or len(named) != len(self._spans):
            raise CannotReduce(
                None,
                f"expected the digests of {len(self._spans)} shards in the commit, found "
                f"{len(named)} of {len(commit.shards)}",
            )

    def _reduce_here(self, commit: Commit) -> None:
        """Reduce the whole fragment, as all owners together do. Raises :class:`CannotReduce`."""
        self._sum(Span(0, self._numel))
        self._check_shards(commit)

    # -- reduced shards --------------------------------------------------------------------------

    def encoded_span(self) -> tuple[Tensor, Tensor]:
        """Reduce this process's part of a shard; return its encoded mean and residual, both 1-d
        uint8. ``merged`` has the decoded mean then. Raises :class:`CannotReduce`."""
        self._sum(self._span)
        if self._is_low_bit:
            with self._timings.measure("reduce"):
                return LowBitShard(self._codec, self.merged, self._span, numel=self._numel).bodies
        self._through_codec(self.merged)
        return self._codec.encode(self.merged), torch.empty(0, dtype=torch.uint8)

    def object_bytes(self, numel: int) -> tuple[int, int]:
        """Return the sizes of the encoded mean and of the residual of ``numel`` elements from a
        block boundary on."""
        residual = CheckedBlocks(get_codec(RESIDUAL_CODEC), self._numel)
        residual_bytes = residual.size_bytes(numel) if self._is_low_bit else 0
        return self._codec.encoded_bytes(numel), residual_bytes

    def digest_of_shard(self, shard: int, body: Tensor) -> str:
        """Return the digest of a shard by its object's bytes, 1-d uint8."""
        first = self._spans[shard].start
        ends = [(part.start - first, part.stop - first) for part in self._mean.parts(shard)]
        size = self._codec.encoded_bytes
        return _digest_of(raw(body[size(start) : size(stop)]) for start, stop in ends)

    def read_mean(self, digests: Mapping[int, str], *, early: bool) -> dict[int, Chunks]:
        """Read this process's part of shards into ``merged``; return the chunks that were read.
        Raises :class:`CannotReduce`."""
        return self._mean.read(digests, self.merged, early=early)

    def _encoded(self, shard: int) -> tuple[str, MakeParts, int]:
        """Pass a summed shard through the reduced codec; return the digest of its encoded mean, and
        its object with its size in bytes."""
        span, parts = self._spans[shard], self._mean.parts(shard)
        vector = self.merged[span.start : span.stop]
        if self._is_low_bit:
            with self._timings.measure("reduce"):
                low_bit = LowBitShard(self._codec, vector, span, numel=self._numel)
            return _digest_of(map(low_bit.mean, parts)), low_bit.parts, low_bit.size_bytes
        self._through_codec(vector)
        size_bytes = self._codec.encoded_bytes(span.numel)
        digest = _digest_of(self._bodies(parts))
        return digest, lambda: self._bodies(parts) if parts else [b""], size_bytes

    def _bodies(self, parts: Iterable[Span]) -> Iterator[memoryview]:
        """Encode parts of the merged fragment."""
        for part in parts:
            yield raw(self._codec.encode(self.merged[part.start : part.stop]))

    def _collect(self, commit: Commit) -> None:
        """Read the reduced shards into the merged fragment. Raises :class:`CannotReduce`."""
        missing = self._missing_shards(commit.shards)
        damaged = self._read_shards(missing)
        for _ in range(READS - 1):
            for shard in damaged:  # can be damaged in transfer
                key = keys.reduced_shard(self._plan.round, shard, missing[shard])
                log.warning("%s: expected its digest, found another; reading it again", key)
            damaged = self._read_shards({shard: missing[shard] for shard in damaged})
        for shard in damaged:
            key = keys.reduced_shard(self._plan.round, shard, missing[shard])
            raise CannotReduce(None, f"{key} is damaged: expected its digest, found another")

    def _read_shards(self, digests: Mapping[int, str], *, early: bool = False) -> list[int]:
        """Read shards into the merged fragment; return those that are damaged. Raises
        :class:`CannotReduce`."""
        if not digests:
            return []
        results = self._read_mean(digests, early=early)
        damaged = []
        for shard, wanted in digests.items():
            if joined_digest(read[shard] for read in results) == wanted:
                self._reduced_shards[shard] = wanted
            else:
                damaged.append(shard)
        return damaged

    def _read_mean(self, digests: Mapping[int, str], *, early: bool) -> list[dict[int, Chunks]]:
        """Read shards into the merged fragment; return what each rank has read."""
        return [self._mean.read(digests, self.merged, early=early)]

    def _missing_shards(self, digests: Sequence[str]) -> dict[int, str]:
        """Return the digests of the shards that the merged fragment does not have."""
        return {
            shard: wanted
            for shard, wanted in enumerate(digests)
            if self._reduced_shards.get(shard) != wanted
        }

    def _check_shards(self, commit: Commit) -> None:
        """Pass the summed fragment through the reduced codec and compare it with the committed
        digests. Raises :class:`CannotReduce`."""
        for shard in range(len(self._spans)):
            expected = commit.shards[shard]
            found, *_ = self._encoded(shard)
            if found != expected:
                raise CannotReduce(
                    None,
                    f"expected digest {expected} of shard {shard}, found {found} from the payloads",
                )

    # -- the sum ---------------------------------------------------------------------------------

    def _sum(self, span: Span) -> None:
        """Write the mean of ``span``, with the residual, into the merged fragment. Raises
        :class:`CannotReduce`."""
        with contextlib.closing(self._payloads.pieces(span)) as pieces:
            self._sum_pieces(span, pieces)

    def _sum_pieces(
        self, span: Span, pieces: Iterator[tuple[PlannedContribution, Span, Tensor]]
    ) -> None:
        """Do the same with ``pieces`` that begin with those of ``span``; leaves the others."""
        with self._timings.measure("reduce", excluding="download"):
            first = self._span.start
            total = WeightedSum(self.merged[span.start - first : span.stop - first])
            left = span.numel * len(self._plan.contributions)
            while left:
                planned, where, piece = next(pieces)
                self._add(total, span.start, planned, where, piece)
                left -= where.numel
            if self._residual is not None:
                for where, piece in self._residual.pieces(span):
                    total.add(where.start - span.start, piece, 1.0)

    def _add(
        self,
        total: WeightedSum,
        origin: int,
        planned: PlannedContribution,
        part: Span,
        vector: Tensor,
    ) -> None:
        """Add the elements ``part`` of a contribution to ``total``, which begins at ``origin``."""
        if self._is_mean:
            total.add(part.start - origin, vector, planned.weight)
            return
        for index, where in overlaps(self._slots, self._slots[0].offset, part.start, part.numel):
            piece = vector[where.start - part.start : where.stop - part.start]
            weight = _direction_weight(planned, index, self._slots[index])
            total.add(where.start - origin, piece, weight)

    def _through_codec(self, vector: Tensor) -> None:
        """Encode and decode ``vector`` in place, so that all plans apply the same values."""
        if self._codec.name == "fp32":
            return
        with self._timings.measure("reduce"):
            for start in range(0, vector.numel(), SLICE):
                piece = vector[start : start + SLICE]
                self._codec.decode(self._codec.encode(piece), piece.numel(), piece)

    def _restore_norms(self) -> None:
        """RDA: scale each tensor's summed direction to the weighted mean of the norms."""
        if self._is_mean:
            return
        rescale(self.merged, self.lengths)

    @property
    def lengths(self) -> list[tuple[Span, float]]:
        """The elements of each tensor that RDA scales, and the weighted mean of its norms."""
        first = self._slots[0].offset
        return [
            (
                Span(slot.offset - first, slot.stop - first),
                sum(c.weight * c.norms[index] for c in self._plan.contributions),
            )
            for index, slot in enumerate(self._slots)
            if not slot.embedding
        ]


def _in_pool(pool: DaemonPool, function: Callable[[], None]) -> Future[None]:
    """Call ``function`` in the thread of a pool, or here if the system starts none."""
    with contextlib.suppress(RuntimeError):
        return pool.submit(function)
    called: Future[None] = Future()
    function()
    called.set_result(None)
    return called


def _digest_of(bodies: Iterable[memoryview]) -> str:
    content = ContentDigest()
    for body in bodies:
        content.update(body)
    return content.hexdigest()


def _is_key(round: int, shard: int, digest: str) -> bool:
    return keys.parse_reduced_shard(keys.reduced_shard(round, shard, digest)) is not None


def _direction_weight(planned: PlannedContribution, index: int, slot: Slot) -> float:
    """Return the weight of tensor ``index`` in RDA, which sums unit vectors; embeddings are
    averaged without normalization."""
    if slot.embedding:
        return planned.weight
    norm = planned.norms[index]
    return planned.weight / norm if norm > SMALLEST_NORM else 0.0
