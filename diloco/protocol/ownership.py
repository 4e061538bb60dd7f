"""Whose a prefix is: ``owner.json``, the first object of a run, written once.

A run is launched only into a prefix that is empty or carries its own marker, so whatever lies under
a key of the protocol there is the run's and can be deleted with it. The prefix is listed before the
marker is made: a launch that dies between the two finds the prefix empty again, one that dies later
finds its marker.

Left out: an object that another program writes between the listing and the marker. Deleting a run
removes only keys of the protocol (:func:`diloco.protocol.keys.kind_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.protocol import keys
from diloco.protocol.records import BadRecord, Record
from diloco.store.base import MissingKey, Store, first_objects

MARKER_BYTES = 10_000
"""A larger object is no marker."""
NAMED = 5
"""Objects that a refusal names."""
LISTED = 1000
"""Objects that are looked at to find those that a preflight left behind."""


class PrefixTaken(ValueError):
    """The prefix holds objects that are not this run's; the message names some of them."""


@dataclass(frozen=True, kw_only=True)
class PrefixOwner(Record):
    """Create-once: the run that the prefix belongs to."""

    run_id: str


def owner_of(store: Store) -> str | None:
    """The run id that the marker names; None without one. Raises :class:`PrefixTaken` for an object
    under its key that is no marker."""
    try:
        data = store.get_range(keys.OWNER, 0, MARKER_BYTES + 1)
    except MissingKey:
        return None
    try:
        if len(data) > MARKER_BYTES:
            raise BadRecord(f"expected at most {MARKER_BYTES} bytes, found more")
        return PrefixOwner.from_bytes(data).run_id
    except BadRecord as error:
        raise PrefixTaken(f"{store.uri}: {keys.OWNER} is no marker of a run: {error}") from None


def claim(store: Store, run_id: str) -> None:
    """Make the prefix this run's, or find that it is. Raises :class:`PrefixTaken`."""
    if owner_of(store) is None:
        check_empty(store, sweep=True)
    mark(store, run_id)


def mark(store: Store, run_id: str) -> None:
    """Write the marker, without a look at what lies there. Raises :class:`PrefixTaken` where there
    is another run's."""
    if owner_of(store) is None:
        store.create(keys.OWNER, PrefixOwner(run_id=run_id).to_bytes())
    found = owner_of(store)
    if found != run_id:
        raise PrefixTaken(
            f"{store.uri}: expected an empty prefix or one of run {run_id}, found {keys.OWNER} of "
            f"run {found}"
        )


def check_empty(store: Store, *, sweep: bool = False) -> None:
    """Raises :class:`PrefixTaken` for a prefix that holds anything but objects of a preflight, be
    it under way or interrupted. ``sweep`` removes these."""
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
    """The first few of ``count`` names, as a message has them."""
    first = ", ".join(repr(name) for name in names[:NAMED])
    more = count - min(len(names), NAMED)
    return f"{first} and {more} more" if more > 0 else first
