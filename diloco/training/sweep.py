"""Deletion of the objects that no joining replica needs, after each checkpoint."""

from __future__ import annotations

from diloco.protocol import keys
from diloco.store.base import Store

SWEPT_AGAIN = 3
"""Number of previous checkpoints whose rounds each sweep lists again."""
SWEPT_AT_THE_END = 2000
"""Maximum number of rounds that the last sweep of a run lists."""


def sweep(store: Store, *, rounds_kept: int = 0, at_the_end: bool = False) -> int:
    """Delete the objects that no joining replica needs; return their number.

    Kept are the newest two complete checkpoints, the payloads of rounds after the older of them and
    of ``rounds_kept`` rounds before, and all manifests and records; the records of old rounds are
    packed (:mod:`diloco.training.round_packs`). A sweep can miss objects (its process died, or an
    upload arrived later), so each sweep lists the rounds of the last checkpoints again, and the
    sweep ``at_the_end`` of a run many more. The cost is one request per round and sweep; each round
    is listed :data:`SWEPT_AGAIN` + 1 times.
    """
    listed = [info.key for info in store.list(keys.CHECKPOINTS)]
    manifests = {
        key: round for key in listed if (round := keys.parse_checkpoint_manifest(key)) is not None
    }
    rounds = sorted(manifests.values())
    if len(rounds) < 2:
        return 0
    older = rounds[-2]
    last = older - rounds_kept
    first = max(1, rounds[max(0, len(rounds) - 3 - SWEPT_AGAIN)] + 1 - rounds_kept)
    if at_the_end:
        first = min(first, max(1, last + 1 - SWEPT_AT_THE_END))
    # The writer of a later checkpoint can still be about to create its manifest.
    limit = f"{keys.CHECKPOINTS}{older:08d}/"
    obsolete = [key for key in listed if key not in manifests and key < limit]
    for round in range(first, last + 1):
        obsolete += [
            info.key for info in store.list(keys.round_dir(round)) if keys.is_temporary(info.key)
        ]
    if obsolete:
        store.delete(obsolete)
    return len(obsolete)
