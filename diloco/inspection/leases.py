"""Leases, looked at more than once: the only way to tell who is alive (invariant I5).

A beat's own time is another machine's and says nothing. A lease that changes between two looks is
alive; one that does not is silent, and dead after the group's heartbeat timeout on our clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from diloco.clock import Clock
from diloco.inspection.picture import LeaseSeen, Unreadable
from diloco.protocol import keys
from diloco.protocol.records import BadRecord, Beat
from diloco.store.base import MissingKey, Store

NEWEST = 3
"""Incarnations of one replica that are looked at; older ones cannot matter."""


class LeaseWatch:
    """Remembers when each lease last changed, on this process's clock."""

    def __init__(
        self, store: Store, pool: ThreadPoolExecutor, *, clock: Clock, timeout_s: float
    ) -> None:
        self.incarnations: dict[int, int] = {}
        self.unreadable: tuple[Unreadable, ...] = ()
        self._store = store
        self._pool = pool
        self._clock = clock
        self._timeout_s = timeout_s
        self._changed_s: dict[str, float] = {}
        self._beats: dict[str, Beat] = {}
        self._moved: set[str] = set()
        self._looks = 0

    def look(self) -> tuple[LeaseSeen, ...]:
        """One list and a GET for each lease; by replica and incarnation."""
        self._looks += 1
        bad: list[Unreadable] = []
        newest = self._newest()
        now_s = self._clock.monotonic()
        for key, beat in zip(newest, self._pool.map(self._read, newest), strict=True):
            if isinstance(beat, Unreadable):
                bad.append(beat)
            elif beat is not None:
                self._notice(key, beat, now_s)
        self.unreadable = tuple(bad)
        return tuple(self._seen(key, now_s) for key in newest if key in self._beats)

    def pause_s(self, leases: Sequence[LeaseSeen]) -> float:
        """How long to wait between two looks, so that whoever is alive has beaten; 0 if nobody
        claims to be."""
        intervals = [lease.beat.interval_s for lease in leases if not lease.ended]
        return min(1.5 * max(intervals), self._timeout_s) if intervals else 0.0

    def _newest(self) -> list[str]:
        names: dict[int, list[str]] = {}
        for info in self._store.list(keys.MEMBERS):
            if parsed := keys.parse_beat(info.key):
                names.setdefault(parsed[0], []).append(parsed[1])
        self.incarnations = {replica: len(found) for replica, found in names.items()}
        return [
            keys.beat(replica, incarnation)
            for replica, found in sorted(names.items())
            for incarnation in sorted(found)[-NEWEST:]
        ]

    def _read(self, key: str) -> Beat | Unreadable | None:
        known = self._beats.get(key)
        if known is not None and self._ended(known):
            return known  # a last beat does not change
        try:
            return Beat.read(self._store, key)
        except MissingKey:
            return None
        except BadRecord as error:
            return Unreadable(key=key, reason=str(error))

    def _notice(self, key: str, beat: Beat, now_s: float) -> None:
        known = self._beats.get(key)
        if known is None or known.count != beat.count:
            self._changed_s[key] = now_s
            if known is not None or self._looks > 1:
                self._moved.add(key)
        self._beats[key] = beat

    def _seen(self, key: str, now_s: float) -> LeaseSeen:
        beat, silent_s = self._beats[key], now_s - self._changed_s[key]
        if self._ended(beat):
            life = "ended"
        elif silent_s >= self._timeout_s:
            life = "dead"
        elif silent_s > 1.2 * beat.interval_s:
            life = "silent"
        elif key in self._moved:
            life = "live"
        else:
            life = "unknown"
        return LeaseSeen(beat=beat, life=life, silent_s=silent_s)

    @staticmethod
    def _ended(beat: Beat) -> bool:
        return LeaseSeen(beat=beat, life="unknown").ended
