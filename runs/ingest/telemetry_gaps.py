"""Moves telemetry cursors past segments that the bucket has no more.

A replica deletes its oldest telemetry (:mod:`diloco.telemetry.compaction`), and a lifecycle rule of
the bucket can do the same, read or not.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco.protocol import keys
from diloco.protocol.packed_telemetry import next_segment
from diloco.store.base import Store
from runs.models import TelemetryCursor


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Segments ``first`` to ``last`` of the cursor's process are gone, and later ones are there."""

    cursor: TelemetryCursor
    first: int
    last: int

    @property
    def ends(self) -> tuple[str, str]:
        """Return the keys of the first and the last segment that is gone."""
        number, incarnation = self.cursor.replica.number, self.cursor.incarnation
        first, last = (keys.telemetry(number, incarnation, n) for n in (self.first, self.last))
        return first, last

    def skip(self) -> bool:
        """Move the cursor past the gap; return whether it was still there."""
        moved = TelemetryCursor.objects.filter(pk=self.cursor.pk, next_n=self.first).update(
            next_n=self.last + 1, ended=False
        )
        return bool(moved)


def find_gap(store: Store, cursor: TelemetryCursor) -> Gap | None:
    """Return the gap at which a cursor without a next segment stands; lists its process's folder.
    None if there is no later segment."""
    number, incarnation = cursor.replica.number, cursor.incarnation
    following = next_segment(store, number, incarnation, cursor.next_n)
    if following <= cursor.next_n:
        return None
    return Gap(cursor=cursor, first=cursor.next_n, last=following - 1)
