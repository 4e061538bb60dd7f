"""One open store per rendezvous and process.

Opened after the fork, because clients of object stores do not survive one, and kept, because each
opening costs connections.
"""

from __future__ import annotations

import os
from functools import lru_cache

from diloco.rendezvous.store import Store, open_store
from runs.models import Run


def store_for(run: Run) -> Store:
    return _open(os.getpid(), run.rendezvous)


@lru_cache(maxsize=64)
def _open(pid: int, uri: str) -> Store:
    return open_store(uri)
