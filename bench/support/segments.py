"""Read the telemetry of a run."""

from __future__ import annotations

from collections.abc import Iterator

from diloco.protocol import keys
from diloco.protocol.packed_telemetry import read_pack
from diloco.protocol.telemetry import Segment
from diloco.store.base import Store


def every_segment(store: Store) -> Iterator[bytes]:
    """Yield the bytes of all segments, packed or not, by process and number. Raises
    :class:`BadRecord` for a damaged pack."""
    found: dict[tuple[int, str, int], bytes] = {}
    for info in store.list(keys.TELEMETRY):
        if (name := keys.parse_telemetry_pack(info.key)) is not None:
            replica, incarnation, first = name
            packed = read_pack(store, replica, incarnation, first)
            found |= {(replica, incarnation, n): data for n, data in packed.items()}
    for info in store.list(keys.TELEMETRY):
        if (name := keys.parse_telemetry(info.key)) is not None:
            found[name] = store.get(info.key, limit=Segment.LIMIT)
    for name in sorted(found):
        yield found[name]
