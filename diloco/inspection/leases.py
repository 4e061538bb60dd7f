"""Watches leases over several looks, the only way to detect which processes are alive (invariant
I5).

A heartbeat's own time is another machine's and is not used. A lease that changes between two looks
is live; one that does not is silent, and dead after the group's heartbeat timeout on this clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from diloco.clock import Clock
from diloco.inspection.picture import ObservedLease, Unreadable
from diloco.protocol import keys
from diloco.protocol.control_pace import calm_bound_s, default_interval_s
from diloco.protocol.records import BadRecord, Heartbeat
from diloco.store.base import MissingKey, Store

NEWEST = 3
"""Incarnations per replica that are read; older ones are not relevant."""


class LeaseWatch:
    """Records when each lease last changed, on this process's clock."""

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
        self._beats: dict[str, Heartbeat] = {}
        self._moved: set[str] = set()
        self._looks = 0

    def look(self) -> tuple[ObservedLease, ...]:
        """Read all leases: one listing and one GET per lease. Returns them sorted by replica and
        incarnation."""
        self._looks += 1
        unreadable: list[Unreadable] = []
        newest = self._newest()
        now_s = self._clock.monotonic()
        for key, beat in zip(newest, self._pool.map(self._read, newest), strict=True):
            if isinstance(beat, Unreadable):
                unreadable.append(beat)
            elif beat is not None:
                self._notice(key, beat, now_s)
        self.unreadable = tuple(unreadable)
        return tuple(self._seen(key, now_s) for key in newest if key in self._beats)

    def look_until_known(self) -> tuple[ObservedLease, ...]:
        """Look until each lease has changed or ended, or for :meth:`pause_s`."""
        leases = self.look()
        until_s = self._clock.monotonic() + self.pause_s(leases)
        pause_s = default_interval_s(self._timeout_s)
        while any(lease.life not in ("live", "ended") for lease in leases):
            left_s = until_s - self._clock.monotonic()
            if left_s <= 0:
                break
            self._clock.sleep(min(pause_s, left_s))
            leases = self.look()
        return leases

    def pause_s(self, leases: Sequence[ObservedLease]) -> float:
        """Return the seconds between two looks within which every live process sends a heartbeat; 0
        if no process claims to be live."""
        intervals = [lease.beat.interval_s for lease in leases if not lease.ended]
        longest_s = max(intervals, default=0.0)
        if calm_s := calm_bound_s(longest_s, self._timeout_s):
            return 1.2 * calm_s
        return min(1.5 * longest_s, self._timeout_s)

    def _newest(self) -> list[str]:
        names: dict[int, list[str]] = {}
        for info in self._store.list(keys.MEMBERS):
            if parsed := keys.parse_beat(info.key):
                names.setdefault(parsed[0], []).append(parsed[1])
        self.incarnations = {replica: len(incarnations) for replica, incarnations in names.items()}
        return [
            keys.beat(replica, incarnation)
            for replica, incarnations in sorted(names.items())
            for incarnation in sorted(incarnations)[-NEWEST:]
        ]

    def _read(self, key: str) -> Heartbeat | Unreadable | None:
        known = self._beats.get(key)
        if known is not None and self._ended(known):
            return known  # a final heartbeat does not change
        try:
            return Heartbeat.read(self._store, key)
        except MissingKey:
            return None
        except BadRecord as error:
            return Unreadable(key=key, reason=str(error))

    def _notice(self, key: str, beat: Heartbeat, now_s: float) -> None:
        known = self._beats.get(key)
        if known is None or known.count != beat.count:
            self._changed_s[key] = now_s
            if known is not None or self._looks > 1:
                self._moved.add(key)
        self._beats[key] = beat

    def _seen(self, key: str, now_s: float) -> ObservedLease:
        beat, silent_s = self._beats[key], now_s - self._changed_s[key]
        if self._ended(beat):
            life = "ended"
        elif silent_s >= self._timeout_s + calm_bound_s(beat.interval_s, self._timeout_s):
            life = "dead"
        elif silent_s > 1.2 * beat.interval_s:
            life = "silent"
        elif key in self._moved:
            life = "live"
        else:
            life = "unknown"
        return ObservedLease(beat=beat, life=life, silent_s=silent_s)

    @staticmethod
    def _ended(beat: Heartbeat) -> bool:
        return ObservedLease(beat=beat, life="unknown").ended
