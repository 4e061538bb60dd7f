"""Who does the work of an exchange in a replica: this process alone, or all ranks together.

Only encoding, uploads and reductions are shared. The leader of a replica alone writes records,
plans and commits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict, Unpack

from torch import Tensor

from diloco.clock import Clock
from diloco.codecs import get_codec
from diloco.exchange.payload import PayloadInfo, PayloadWriter
from diloco.exchange.payload_reader import Own
from diloco.exchange.reduce import Reduction
from diloco.exchange.timings import Timings
from diloco.exchange.upload import bytes_to_verify, upload
from diloco.model.fragments import Slot
from diloco.protocol import keys
from diloco.protocol.blocks import Span
from diloco.protocol.records import Commit, Plan
from diloco.protocol.settings import GroupSettings
from diloco.store.base import Store


@dataclass(frozen=True, kw_only=True)
class UploadedPart:
    """An object of a payload, which is durable.

    ``checksums`` and ``squares`` are those of :class:`~diloco.exchange.payload.PayloadWriter`, also
    ``body``. ``verify`` reads the stored object back, which takes time, uploads it again if it is
    damaged, and returns a description of the damage that remains, '' if there is none.
    """

    size_bytes: int
    checksums: str
    squares: Sequence[tuple[int, float]]
    encode_s: float
    verify: Callable[[], str]
    body: Tensor | None = None


class ReductionOptions(TypedDict):
    """Arguments of :class:`Reduction` besides what is reduced."""

    timings: Timings
    commit_of: Callable[[int], Commit | None]
    own: Own | None


class Team(Protocol):
    """The processes that share the work of one replica's exchanges."""

    def upload(
        self, info: PayloadInfo, vector: Tensor, slots: Sequence[Slot]
    ) -> list[UploadedPart]:
        """Upload the payload of a contribution; return its objects in order. ``vector`` are the
        elements that this process holds. Raises :class:`~diloco.store.base.StoreError`."""
        ...

    def reduction(
        self, plan: Plan, slots: Sequence[Slot], **options: Unpack[ReductionOptions]
    ) -> Reduction:
        """Return the reduction of a plan; arguments as for :class:`Reduction`."""
        ...


class OneProcess:
    """The team of a replica of one process, and one rank's part in a larger one."""

    def __init__(self, store: Store, settings: GroupSettings, clock: Clock) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._codec = get_codec(settings.codec, topk=settings.topk)
        self._verify_bytes = bytes_to_verify()

    def upload(
        self, info: PayloadInfo, vector: Tensor, slots: Sequence[Slot]
    ) -> list[UploadedPart]:
        return [self.upload_slice(info, vector, slots)]

    def upload_slice(
        self,
        info: PayloadInfo,
        vector: Tensor,
        slots: Sequence[Slot],
        *,
        slice: int = 0,
        span: Span | None = None,
    ) -> UploadedPart:
        """Upload the elements ``span`` of the fragment, or all, as object ``slice``."""
        packing, verify = upload(
            self._store,
            keys.contribution_payload(info.round, info.replica, info.incarnation, slice),
            lambda: PayloadWriter(
                info,
                vector,
                self._codec,
                slots,
                clock=self._clock,
                exact_norms=self._settings.merge == "rda",
                span=span,
            ),
            self._codec,
            verify_bytes=self._verify_bytes,
        )
        return UploadedPart(
            size_bytes=packing.size_bytes,
            checksums=packing.checksums,
            squares=packing.squares,
            encode_s=packing.encode_s,
            verify=verify,
            body=packing.body,
        )

    def reduction(
        self, plan: Plan, slots: Sequence[Slot], **options: Unpack[ReductionOptions]
    ) -> Reduction:
        return Reduction(self._store, self._settings, plan, slots, **options)
