"""The reduction: a plan's payloads to one merged mean.

``gather``: every replica reads every payload and sums in fp32 in the plan's order. The mean then
goes through the codec once, encode and decode, so that a plan in which the mean itself travels
gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.codec import get_codec
from diloco.outer import digest, merge
from diloco.rendezvous import keys
from diloco.rendezvous.records import Plan, PlannedContribution
from diloco.rendezvous.store import MissingKey, Store
from diloco.wire import BadPayload, PayloadInfo, unpack


class CannotReduce(Exception):
    """A planned payload is missing or is not what the plan says; the round must be void."""

    def __init__(self, replica: int, reason: str) -> None:
        super().__init__(f"payload of replica {replica}: {reason}")
        self.replica = replica
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The averaged pseudo-gradient of a round, (numel,) fp32 on the CPU, and its digest."""

    vector: Tensor
    digest: str


def gather(
    store: Store,
    plan: Plan,
    *,
    codec_name: str,
    numel: int,
    own: tuple[str, bytearray] | None = None,
    on_download: Callable[[Callable[[], bytes]], bytes] = lambda get: get(),
) -> Merged:
    """Read, verify and merge every payload of ``plan``.

    ``own`` is (digest, payload) of what this replica itself uploaded: it is not downloaded again.
    ``on_download`` wraps each download, for timing. Raises :class:`CannotReduce`; a store that
    does not answer raises its own error, which says nothing about the payload.
    """
    codec = get_codec(codec_name)

    def vectors() -> Iterator[tuple[float, Tensor]]:
        for planned in plan.contributions:
            data = _payload(store, plan, planned, own, on_download)
            info = PayloadInfo(
                round=plan.round,
                fragment=plan.fragment,
                replica=planned.replica,
                incarnation=planned.incarnation,
                codec=codec_name,
                numel=numel,
            )
            try:
                vector = codec.decode(unpack(data, info, digest=planned.digest))
            except BadPayload as error:
                raise CannotReduce(planned.replica, str(error)) from None
            if not bool(torch.isfinite(vector).all()):
                raise CannotReduce(planned.replica, "expected finite values, found NaN or infinity")
            yield planned.weight, vector

    mean = merge(vectors(), numel=numel)
    reduced = codec.decode(codec.encode(mean))
    return Merged(vector=reduced, digest=digest(reduced))


def _payload(
    store: Store,
    plan: Plan,
    planned: PlannedContribution,
    own: tuple[str, bytearray] | None,
    on_download: Callable[[Callable[[], bytes]], bytes],
) -> bytes | bytearray:
    if own is not None and own[0] == planned.digest:
        return own[1]
    key = keys.contribution_payload(plan.round, planned.replica, planned.incarnation)
    try:
        return on_download(lambda: store.get(key))
    except MissingKey:
        raise CannotReduce(planned.replica, f"expected an object {key}, found none") from None
