"""Sealing and opening, with keys that are never in the database.

``settings.CREDENTIALS_KEYS`` are Fernet keys (AES-128-CBC with HMAC-SHA256): the first seals, all
open, so that one can be replaced by another while the server works. See
https://cryptography.io/en/stable/fernet/.

What was opened is remembered by :mod:`runs.redaction`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.conf import settings

from executors.base import NeedsPerson
from runs import redaction
from runs.credentials.kinds import is_secret
from runs.models import Credential


class CannotOpen(NeedsPerson):
    """No key we have opens the credential."""

    def __init__(self, name: str) -> None:
        keys = len(settings.CREDENTIALS_KEYS)
        super().__init__(
            f"credential {name!r} cannot be opened: it was sealed with another key than the "
            f"{keys} of ARCHIPELAGO_CREDENTIALS_KEY (or credentials_key in the state folder). Put "
            "the key it was sealed with behind the others and run manage.py reseal_credentials, or "
            "type its secrets anew"
        )


def open_credential(credential: Credential | None) -> Mapping[str, str]:
    """Environment-variable names and values; empty for None, the server's own environment.

    Raises :class:`CannotOpen`, which only a person can mend.
    """
    if credential is None or not credential.sealed:
        return {}
    return unseal(credential.sealed, name=credential.name)


def seal(values: Mapping[str, str]) -> str:
    return _keys().encrypt(json.dumps(dict(values), sort_keys=True).encode()).decode()


def unseal(sealed: str, *, name: str) -> dict[str, str]:
    try:
        values: dict[str, str] = json.loads(_keys().decrypt(sealed.encode()))
    except InvalidToken:
        raise CannotOpen(name) from None
    redaction.remember(value for variable, value in values.items() if is_secret(variable))
    return values


def reseal(sealed: str, *, name: str) -> str:
    """The same, sealed with the first key."""
    try:
        return _keys().rotate(sealed.encode()).decode()
    except InvalidToken:
        raise CannotOpen(name) from None


def _keys() -> MultiFernet:
    return MultiFernet([Fernet(key) for key in settings.CREDENTIALS_KEYS])
