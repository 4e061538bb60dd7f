"""Configuration of the Manager from its keywords and torchft's environment variables."""

from __future__ import annotations

import os
import re
import uuid
from datetime import timedelta
from typing import Literal
from urllib.parse import urlsplit

from diloco.protocol import keys
from diloco.store.base import Store, exists
from diloco.store.open import open_store
from diloco.store.uris import check_rendezvous


def timeouts_s(timeout: timedelta, quorum_timeout: timedelta) -> tuple[float, float]:
    """Return the timeouts (operations, quorum) in seconds; torchft's environment variables override
    the keywords."""
    operations = os.environ.get("TORCHFT_TIMEOUT_SEC")
    quorum = os.environ.get("TORCHFT_QUORUM_TIMEOUT_SEC")
    return (
        float(operations) if operations else timeout.total_seconds(),
        float(quorum) if quorum else quorum_timeout.total_seconds(),
    )


def what_to_resume(resume: object, save_every: int) -> bool | Literal["auto"]:
    """Validate ``resume``; without saved states, "auto" becomes False. Raises
    :class:`ValueError`."""
    if save_every < 0:
        raise ValueError(f"save_every: expected 0 (never) or more steps, found {save_every}")
    if resume == "auto":
        return "auto" if save_every else False
    if isinstance(resume, bool):
        return resume
    raise ValueError(f"resume: expected True, False or 'auto', found {resume!r}")


def find_store(rendezvous: str | Store | None, lighthouse_addr: str | None) -> Store:
    """Open the group's store.

    In this order: ``rendezvous``; a lighthouse address that is the URI of a store; a folder in
    ``ARCHIPELAGO_RENDEZVOUS`` named after the lighthouse address. Raises :class:`ValueError`.
    """
    if rendezvous is not None:
        store = (
            open_store(check_rendezvous(rendezvous)) if isinstance(rendezvous, str) else rendezvous
        )
    else:
        address = lighthouse_addr or os.environ.get("TORCHFT_LIGHTHOUSE", "")
        if urlsplit(address).scheme not in ("", "http", "https") and "//" in address:
            store = open_store(check_rendezvous(address))
        elif base := os.environ.get("ARCHIPELAGO_RENDEZVOUS"):
            group = re.sub(r"[^A-Za-z0-9_-]+", "-", address).strip("-") or "manager"
            store = open_store(f"{check_rendezvous(base).rstrip('/')}/{group}")
        else:
            raise ValueError(
                "rendezvous: expected a store's URI, here or as lighthouse_addr, "
                f"TORCHFT_LIGHTHOUSE or ARCHIPELAGO_RENDEZVOUS, found {address!r}"
            )
    if exists(store, keys.GROUP):
        raise ValueError(
            f"rendezvous: expected one without {keys.GROUP}, found a run of diloco.join "
            f"in {store.uri}"
        )
    if not store.atomic_create:
        raise ValueError(
            f"rendezvous: expected a store with atomic create, found {store.uri}, "
            "where two members could make different decisions"
        )
    return store


def rank_and_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the rank in the replica and the number of its ranks, by default from torchrun."""
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ValueError(f"rank: expected 0 to {world_size - 1}, found {rank}")
    return rank, world_size


def name_of_replica(
    replica_id: str | None, *, world_size: int, store_addr: str | None, store_port: int | None
) -> str:
    """Return ``replica_id``, or else a new name; the ranks of one replica derive it from the
    address of their TCP store."""
    if replica_id:
        return replica_id
    if world_size == 1:
        return str(uuid.uuid4())
    address = store_addr or os.environ.get("MASTER_ADDR")
    port = store_port or os.environ.get("MASTER_PORT")
    if not address or not port:
        raise ValueError(
            f"replica_id: expected a name, as the replica has {world_size} ranks, found none"
        )
    return f"{address}:{port}"
