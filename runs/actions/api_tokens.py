"""API tokens: create, look up, revoke.

A token is 32 random bytes behind a prefix that secret scanners recognise. The database stores its
sha256. A password hash would only be slower, because 256 random bits cannot be guessed.
"""

from __future__ import annotations

import hashlib
import secrets
from datetime import datetime, timedelta

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from runs import audit
from runs.models import ApiToken

PREFIX = "arch_"
SCOPES = {
    "read": "View and export runs",
    "operate": "Also submit, stop, scale and restart runs",
    "admin": "Also manage users, credentials, webhooks, prices and budgets",
}
"""Scopes and what they allow; each implies those before it."""

NAME_LENGTH = 80
LONGEST_DAYS = 3650
PER_PERSON = 100

USED_EVERY = timedelta(minutes=1)
"""How old ``last_used_at`` gets before a use updates it."""


def issue(
    owner: User, *, name: str, scopes: list[str], days: int | None = None
) -> tuple[ApiToken, str]:
    """Create a token; return it with its text, which is not stored. ``days`` None: no expiry.

    Raises ``ValueError`` with expected and found.
    """
    name = name.strip()
    if not 1 <= len(name) <= NAME_LENGTH:
        raise ValueError(f"expected a name of 1 to {NAME_LENGTH} characters, found {len(name)}")
    wanted = set(scopes)
    if not wanted or wanted - set(SCOPES):
        raise ValueError(f"expected scopes of {', '.join(SCOPES)}, found {sorted(wanted)}")
    if days is not None and not 1 <= days <= LONGEST_DAYS:
        raise ValueError(f"expected 1 to {LONGEST_DAYS} days, found {days}")
    if tokens_of(owner).count() >= PER_PERSON:
        raise ValueError(f"expected at most {PER_PERSON} tokens, found that many: revoke some")
    text = PREFIX + secrets.token_urlsafe(32)
    now = timezone.now()
    token = ApiToken.objects.create(
        owner=owner,
        name=name,
        hint=text[: len(PREFIX) + 4],
        digest=digest_of(text),
        scopes=_implied(wanted),
        created_at=now,
        expires_at=None if days is None else now + timedelta(days=days),
    )
    audit.record(
        "token.created",
        actor=owner,
        target=f"token {name} ({token.hint}…)",
        detail=f"scopes {', '.join(token.scopes)}, expires {token.expires_at or 'never'}",
    )
    return token, text


def _implied(wanted: set[str]) -> list[str]:
    """All scopes up to the strongest that is wanted."""
    order = list(SCOPES)
    return order[: max(map(order.index, wanted)) + 1]


def find(text: str, *, now: datetime) -> ApiToken | None:
    """The valid token with this text; None if there is none. Records the use from time to time."""
    if not text.startswith(PREFIX):
        return None
    token = (
        ApiToken.objects.select_related("owner")
        .filter(digest=digest_of(text), revoked_at=None, owner__is_active=True)
        .filter(Q(expires_at=None) | Q(expires_at__gt=now))
        .first()
    )
    if token is None:
        return None
    if token.last_used_at is None or now - token.last_used_at > USED_EVERY:
        ApiToken.objects.filter(pk=token.pk).update(last_used_at=now)
    return token


def revoke(token: ApiToken, *, actor: User | None = None) -> bool:
    """Revoke the token; False if it was revoked before. ``actor`` None: its owner."""
    with transaction.atomic():
        revoked = ApiToken.objects.filter(pk=token.pk, revoked_at=None).update(
            revoked_at=timezone.now()
        )
        if revoked:
            audit.record(
                "token.revoked",
                actor=actor or token.owner,
                target=f"token {token.name} ({token.hint}…) of {token.owner}",
            )
    return bool(revoked)


def tokens_of(owner: User) -> QuerySet[ApiToken]:
    """Active tokens, newest first."""
    return ApiToken.objects.filter(owner=owner, revoked_at=None)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()
