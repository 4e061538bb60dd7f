"""Packs the records of old rounds, and deletes the contribution records of packed ones.

The replica that writes a checkpoint packs the blocks of rounds up to the checkpoint before the
newest (:mod:`diloco.protocol.packed_rounds`). A pack is created only once, and never changes. One
checkpoint later, it is read back, and the contribution records in it are deleted. So at any moment
each record is under its own key or in an intact pack, wherever a process dies and however many
processes pack at once. A record that arrives later stays under its own key.

A block with a damaged or missing record, with a large one, or with too many bytes, stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from diloco.protocol import keys
from diloco.protocol.packed_rounds import (
    BLOCK,
    UNPACKED_LIMIT,
    first_of_block,
    pack,
    read_pack,
)
from diloco.protocol.parallel_reads import call_each
from diloco.protocol.records import BadRecord, Commit, ContributionRecord, Plan, Record
from diloco.store.base import ListingTooLong, MissingKey, NotAnObject, ObjectTooLarge, Store
from diloco.training.checkpoint import manifest_rounds
from diloco.training.sweep import SWEPT_AGAIN

log = logging.getLogger(__name__)

RECORD_LIMIT = UNPACKED_LIMIT // BLOCK
"""Largest record that is packed. Plans and commits are not listed before they are read, and those
of a block are read at once."""


def pack_rounds(
    store: Store, *, rounds_kept: int = 0, check: Callable[[], None] = lambda: None
) -> None:
    """Pack the rounds that no joining replica needs, and delete what an earlier call has packed.

    ``rounds_kept`` rounds more are left as they are. Each call repeats what the calls after the
    last :data:`~diloco.training.sweep.SWEPT_AGAIN` checkpoints can have missed. ``check`` is
    called before each block and each read; its exception ends the call. Raises the store's errors.
    """
    rounds = manifest_rounds(store)
    if len(rounds) < 2:
        return
    last = rounds[-2] - rounds_kept
    deleted_up_to = rounds[-3] - rounds_kept if len(rounds) > 2 else 0
    first = max(1, rounds[max(0, len(rounds) - 3 - SWEPT_AGAIN)] + 1 - rounds_kept)
    for block in blocks(first, last):
        check()
        try:
            packed = read_pack(store, block)
            if packed is None:
                _create(store, block, check)
            elif block + BLOCK - 1 <= deleted_up_to:
                for deleted in filter(None, _contributions(block, packed)):
                    store.delete(deleted)
        except (BadRecord, ListingTooLong, ValueError) as error:
            log.warning(
                "the records of rounds %d to %d are kept: %s", block, block + BLOCK - 1, error
            )


def blocks(first: int, last: int) -> range:
    """Return the first rounds of the blocks that end in ``first`` to ``last``."""
    begin, end = first_of_block(first), first_of_block(last + 1)
    return range(begin, end, BLOCK)


def _create(store: Store, block: int, check: Callable[[], None]) -> None:
    """Create the pack of a block. Raises :class:`BadRecord` for a damaged or missing record, and
    :class:`ValueError` for too many bytes."""

    def read_one(key: str) -> tuple[str, bytes]:
        check()
        return key, _read(store, key)

    numbers = range(block, block + BLOCK)
    listings = call_each(lambda n: store.list(keys.contributions(n)), numbers)
    sizes = {i.key: i.size_bytes for i in chain(*listings) if keys.parse_contribution_record(i.key)}
    if (size_bytes := sum(sizes.values())) > UNPACKED_LIMIT:
        raise ValueError(f"expected at most {UNPACKED_LIMIT} bytes, found {size_bytes}")
    decisions = [key for n in numbers for key in (keys.plan(n), keys.commit(n))]
    read = dict(call_each(read_one, decisions))
    # A listing can be old, so the records that the plans name are read as well.
    plans = (Plan.from_bytes(read[keys.plan(n)]) for n in numbers)
    contributions = sorted({*sizes, *chain.from_iterable(map(_planned, plans))})
    read |= call_each(read_one, contributions)
    check()
    store.create(keys.round_pack(block), pack(block, read))


def _planned(plan: Plan) -> Iterable[str]:
    for c in plan.contributions:
        if keys.is_incarnation(c.incarnation):
            yield keys.contribution_record(plan.round, c.replica, c.incarnation)


def _read(store: Store, key: str) -> bytes:
    """Return the bytes of an intact record of its own key."""
    kind = _kind_of(key)
    try:
        data = store.get(key, limit=min(kind.LIMIT, RECORD_LIMIT))
        record = kind.from_bytes(data)
    except (MissingKey, NotAnObject, ObjectTooLarge, BadRecord) as error:
        raise BadRecord(f"{key}: {type(error).__name__}: {error}") from None
    _check_key(key, record)
    return data


def _contributions(block: int, packed: Mapping[str, bytes]) -> tuple[list[str], list[str]]:
    """Return the keys of the contribution records in a pack: those that a plan names, which are
    deleted first, so that readers see from a plan that some are deleted; and the others. Raises
    :class:`BadRecord` if the pack has no intact record of one of its keys, or no plan of a round.
    """
    planned: set[str] = set()
    for n in range(block, block + BLOCK):
        if keys.plan(n) not in packed:
            raise BadRecord(f"{keys.round_pack(block)}: expected the plan of round {n}, found none")
        planned.update(_planned(Plan.from_bytes(packed[keys.plan(n)])))
    for key, data in packed.items():
        _check_key(key, _kind_of(key).from_bytes(data))
    found = sorted(filter(keys.parse_contribution_record, packed))
    return [k for k in found if k in planned], [k for k in found if k not in planned]


def _check_key(key: str, record: Record) -> None:
    if (found := _key_of(record)) != key:
        raise BadRecord(f"{key}: expected the record of this key, found that of {found}")


def _kind_of(key: str) -> type[Commit | Plan | ContributionRecord]:
    if keys.parse_contribution_record(key):
        return ContributionRecord
    return Commit if keys.parse_commit(key) is not None else Plan


def _key_of(record: Record) -> str:
    match record:
        case ContributionRecord():
            return keys.contribution_record(record.round, record.replica, record.incarnation)
        case Plan():
            return keys.plan(record.round)
        case Commit():
            return keys.commit(record.round)
    raise TypeError(record)
