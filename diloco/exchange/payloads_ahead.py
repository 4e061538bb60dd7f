"""Reads the payloads of a round before there is a plan.

A round usually has the contributors of the round before. So a replica that has uploaded its payload
begins to read theirs, while its record is written, the contributions are listed and the plan is
created: about five requests, one after the other. The bytes have no effect before the plan names
them, and are checked against the plan like any other part. With other contributors, or another
reduce plan, the reads are dropped.
"""

from __future__ import annotations

from dataclasses import replace

from diloco.codecs import get_codec
from diloco.exchange.payload import PayloadInfo
from diloco.exchange.payload_reader import CannotReduce, Own, PayloadReader
from diloco.exchange.timings import Timings
from diloco.protocol.blocks import Span, shard_spans
from diloco.protocol.control_pace import FAILED_POLLS, READ_AHEAD_PAYLOADS
from diloco.protocol.parallel_reads import ExpectedReads
from diloco.protocol.records import Plan
from diloco.protocol.round_decision import shards_of
from diloco.protocol.round_view import GATHER, SHARDED
from diloco.protocol.settings import GroupSettings
from diloco.store.base import Store


def read_ahead(
    store: Store,
    settings: GroupSettings,
    last: Plan | None,
    info: PayloadInfo,
    own: Own,
    *,
    timings: Timings,
) -> ExpectedReads | None:
    """Begin to read what the writer of the payload ``info`` will read if the plan of its round has
    the mode and the contributors of ``last``, an earlier plan. Returns None if that cannot be."""
    is_small = last is not None and len(last.contributions) <= READ_AHEAD_PAYLOADS
    plan = _expected_plan(last, info, own) if last and is_small else None
    spans = _own_spans(plan, info) if plan else []
    if plan is None or not spans:
        return None
    codec = get_codec(info.codec, topk=settings.topk)
    reader = PayloadReader(store, codec, plan, info.numel, timings=timings, own=own)
    try:
        ranges = reader.ranges(*spans)
    except CannotReduce:
        return None
    if len({key for key, _, _ in ranges}) > READ_AHEAD_PAYLOADS:
        return None  # payloads of several ranks: a poll for each object
    return ExpectedReads(store, ranges, clock=timings.clock, polls=FAILED_POLLS)


def _expected_plan(last: Plan, info: PayloadInfo, own: Own) -> Plan | None:
    """Return the plan of the round of ``info`` with the contributors of ``last``; None if this
    process is not one of them. Weights and digests are unknown, and not needed to read."""
    contributions = tuple(
        replace(planned, digest=own.digest)
        if (planned.replica, planned.incarnation) == (info.replica, info.incarnation)
        else planned
        for planned in last.contributions
    )
    if not any(map(own.matches, contributions)):
        return None
    return replace(last, round=info.round, fragment=info.fragment, contributions=contributions)


def _own_spans(plan: Plan, info: PayloadInfo) -> list[Span]:
    """Return the elements that the writer of ``info`` reduces, in order; none if it reduces
    none."""
    if plan.mode == GATHER:
        return [Span(0, info.numel)]
    if plan.mode == SHARDED:
        spans = shard_spans(info.numel, len(plan.owners))
        return [spans[shard] for shard in shards_of(plan, info.replica)]
    return []
