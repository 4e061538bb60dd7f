"""The textbook way to average over a bucket: one object per tensor, looked for once a second."""

from __future__ import annotations

import time

from bench.support.processes import meet
from diloco.store.base import MissingKey, Store
from diloco.store.open import open_store


def synchronise(number: int, uri: str, replicas: int, sizes: list[int]) -> tuple[float, float]:
    """One synchronisation of one process; when it began and ended.

    Tensor after tensor: put one's own, then wait for that of every peer.
    """
    store = open_store(uri)
    store.put(f"here/{number}", b"")  # the first connection is not part of it
    meet()
    begin = time.monotonic()
    for tensor, numel in enumerate(sizes):
        store.put(f"{tensor}/{number}", bytes(4 * numel))
        for peer in range(replicas):
            if peer != number:
                _wait_for(store, f"{tensor}/{peer}")
    return begin, time.monotonic()


def _wait_for(store: Store, key: str) -> bytes:
    while True:
        try:
            return store.get(key)
        except MissingKey:
            time.sleep(1.0)
