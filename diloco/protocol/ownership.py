"""Ownership of a prefix: ``owner.json``, the first object of a run, is written once.

A run starts only in a prefix that is empty or has its own marker. Every object under a protocol key
is therefore the run's, and can be deleted with it. The prefix is listed before the marker is
created: a launch that dies in between finds an empty prefix again; one that dies later finds its
marker.

Not covered: an object that another program writes between the listing and the marker. Deleting a
run removes only keys of the protocol (:func:`diloco.protocol.keys.kind_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from diloco.protocol import keys
from diloco.protocol.group_document import PROTOCOL
from diloco.protocol.records import BadRecord, Record
from diloco.store.base import MissingKey, Store, first_objects

MARKER_BYTES = 10_000
"""Size limit of a marker."""
NAMED = 5
"""Objects named in an error message."""
LISTED = 1000
"""Objects that are read to find those of an interrupted preflight check."""


class PrefixTaken(ValueError):
    """The prefix holds objects of another owner; the message names some of them."""


@dataclass(frozen=True, kw_only=True)
class PrefixOwner(Record):
    """Create-once: the run that owns the prefix."""

    VERSIONS: ClassVar[tuple[int, ...]] = (2, PROTOCOL)

    run_id: str


def owner_of(store: Store) -> str | None:
    """Return the run id in the marker; None without a marker. Raises :class:`PrefixTaken` if the
    object under its key is not a marker."""
    try:
        data = store.get_range(keys.OWNER, 0, MARKER_BYTES + 1)
    except MissingKey:
        return None
    try:
        if len(data) > MARKER_BYTES:
            raise BadRecord(f"expected at most {MARKER_BYTES} bytes, found more")
        return PrefixOwner.from_bytes(data).run_id
    except BadRecord as error:
        raise PrefixTaken(
            f"{store.uri}: {keys.OWNER} is not the marker of a run: {error}"
        ) from None


def claim(store: Store, run_id: str) -> None:
    """Claim the prefix for a run, or verify that the run owns it. Raises :class:`PrefixTaken`."""
    if owner_of(store) is None:
        check_empty(store, sweep=True)
    mark(store, run_id)


def mark(store: Store, run_id: str) -> None:
    """Write the marker without checking for other objects. Raises :class:`PrefixTaken` if another
    run owns the prefix."""
    if owner_of(store) is None:
        store.create(keys.OWNER, PrefixOwner(run_id=run_id).to_bytes())
    found = owner_of(store)
    if found != run_id:
        raise PrefixTaken(
            f"{store.uri}: expected an empty prefix or one of run {run_id}, found {keys.OWNER} of "
            f"run {found}"
        )


def check_empty(store: Store, *, sweep: bool = False) -> None:
    """Raise :class:`PrefixTaken` if the prefix holds anything but objects of a preflight check,
    running or interrupted. ``sweep`` deletes these."""
    found = first_objects(store, LISTED)
    left = [info.key for info in found if keys.kind_of(info.key) == keys.Kind.PREFLIGHT]
    others = [info.key for info in found if keys.kind_of(info.key) != keys.Kind.PREFLIGHT]
    if others:
        raise PrefixTaken(
            f"expected an empty prefix, found {shown(others, len(others))} in {store.uri}; name "
            "another prefix, or move these objects away"
        )
    if left and sweep:
        store.delete(left)


def shown(names: Sequence[str], count: int) -> str:
    """Format the first of ``count`` names for a message."""
    first = ", ".join(repr(name) for name in names[:NAMED])
    more = count - min(len(names), NAMED)
    return f"{first} and {more} more" if more > 0 else first
