"""Addresses of Weights & Biases servers, which earlier versions kept among the secrets."""

from __future__ import annotations

from typing import Any

from django.db.models import Q

from diloco.trackers.opening import Destination
from runs.bulk import update_row
from runs.credentials.vault import seal, unseal

ADDRESS = "WANDB_BASE_URL"
MOST_CHARS = 500


def move_address(tracker: Any) -> bool:
    """Move the address out of the secrets of ``tracker``, a row of the model or of a migration.

    Called before stored secrets are used, because they can be unreadable during the migration that
    does this for all trackers: their key can be absent then, and come back later. False if there is
    nothing to move. Raises :class:`~runs.credentials.vault.DecryptionError`, and ``ValueError`` for
    an address that is refused; the row is unchanged then.
    """
    if tracker.kind != "wandb" or not tracker.sealed:
        return False
    secrets = unseal(tracker.sealed, name=f"tracker {tracker.name}")
    address = secrets.pop(ADDRESS, "").strip()
    if not address:
        return False
    if len(address) > MOST_CHARS:
        raise ValueError(f"Server: expected at most {MOST_CHARS} characters, found {len(address)}")
    Destination(kind=tracker.kind, server=address, project=tracker.project)
    is_same = Q(sealed=tracker.sealed)
    return update_row(tracker, is_same, server=address, sealed=seal(secrets) if secrets else "")
