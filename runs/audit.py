"""The audit log: an append-only record of security-relevant actions and changes of runs.

Three layers protect it. Database triggers refuse UPDATE, DELETE and TRUNCATE. Each entry contains
the hash of the previous one, so ``manage.py verify_audit_log`` detects a change made without the
triggers. With ``ARCHIPELAGO_AUDIT_LOG`` each entry is also written as a JSON line to a file or to
standard output (``-``), for shipping to a host that this server cannot write to.

An entry is written in the transaction of its action: both are committed, or neither. Failed
sign-ins and denials, which change nothing, have entries, too. Secrets are redacted.

Not recorded: reads, and actions of the control plane itself, which are events of the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC
from functools import partial
from typing import Any

from django.conf import settings
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.db import connection, transaction
from django.utils import timezone

from runs.models import AuditEntry
from runs.redaction import clean_text

address: ContextVar[str] = ContextVar("audit_address", default="")
"""The client's address during a request; empty in workers and commands."""

GENESIS = "0" * 64
LOCK = 0x61756469
"""Number of PostgreSQL's advisory lock that serializes new entries."""
_LIMITS = {"actor": 150, "address": 64, "action": 64, "target": 200, "detail": 2000}


@dataclass(frozen=True, kw_only=True)
class BrokenChain:
    """The first entry that breaks the hash chain; ``entry`` is 0 if there is no such entry."""

    entry: int
    reason: str


def record(
    action: str,
    *,
    actor: AbstractBaseUser | AnonymousUser | str | None,
    target: object = "",
    detail: str = "",
) -> AuditEntry:
    """Add an entry, in the caller's transaction if there is one."""
    name = actor if isinstance(actor, str) else actor.get_username() if actor else ""
    values = {
        "actor": name,
        "address": address.get(),
        "action": action,
        "target": str(target),
        "detail": detail,
    }
    with transaction.atomic():
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK])
        newest = AuditEntry.objects.order_by("-id").values_list("hash", flat=True).first()
        entry = AuditEntry(
            at=timezone.now(),
            previous_hash=newest or GENESIS,
            **{name: clean_text(value, _LIMITS[name]) for name, value in values.items()},
        )
        entry.hash = hash_of(entry)
        entry.save(force_insert=True)
        transaction.on_commit(partial(_send, entry))
    return entry


def as_row(entry: AuditEntry) -> dict[str, Any]:
    """The fields that the hash covers."""
    return {
        "at": entry.at.astimezone(UTC).isoformat(),
        "actor": entry.actor,
        "address": entry.address,
        "action": entry.action,
        "target": entry.target,
        "detail": entry.detail,
        "previous_hash": entry.previous_hash,
    }


def hash_of(entry: AuditEntry) -> str:
    text = json.dumps(as_row(entry), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def verify(*, expected_head: str = "") -> tuple[int, str, BrokenChain | None]:
    """Verify the hash chain: (number of entries, newest hash, first broken entry or None).

    ``expected_head`` is a hash recorded earlier. A log that was truncated or rewritten does not
    contain it.
    """
    count, previous, seen = 0, GENESIS, not expected_head
    for entry in _in_order():
        if entry.previous_hash != previous:
            return count, previous, BrokenChain(entry=entry.pk, reason="an entry before is missing")
        if hash_of(entry) != entry.hash:
            return count, previous, BrokenChain(entry=entry.pk, reason="the entry was changed")
        count, previous = count + 1, entry.hash
        seen = seen or entry.hash == expected_head
    if not seen:
        return count, previous, BrokenChain(entry=0, reason="no entry has the expected hash")
    return count, previous, None


def _in_order() -> Iterator[AuditEntry]:
    return AuditEntry.objects.order_by("id").iterator(chunk_size=1000)


def _send(entry: AuditEntry) -> None:
    """Append an entry to the configured file or to standard output.

    Opens the file each time, because another process can rotate it.
    """
    path = settings.AUDIT_LOG
    if not path:
        return
    row = {"id": entry.pk, **as_row(entry), "hash": entry.hash}
    line = json.dumps(row, ensure_ascii=True) + "\n"
    if path == "-":
        sys.stdout.write(line)
        sys.stdout.flush()
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
