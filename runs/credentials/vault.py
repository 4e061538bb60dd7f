"""Encrypt and decrypt credentials, with keys that are never in the database.

``settings.CREDENTIALS_KEYS`` are Fernet keys (AES-128-CBC with HMAC-SHA256). The first encrypts and
all decrypt, so that a key can be replaced while the server runs. See
https://cryptography.io/en/stable/fernet/.

:mod:`runs.redaction` remembers decrypted secrets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.conf import settings

from executors.base import AccountError
from runs import redaction
from runs.credentials.kinds import is_secret
from runs.models import Credential


class DecryptionError(AccountError):
    """None of the keys decrypts the credential."""

    def __init__(self, name: str) -> None:
        keys = len(settings.CREDENTIALS_KEYS)
        super().__init__(
            f"credential {name!r} cannot be opened: it was sealed with another key than the "
            f"{keys} of ARCHIPELAGO_CREDENTIALS_KEY (or credentials_key in the state folder). Put "
            "the key it was sealed with behind the others and run manage.py reseal_credentials, or "
            "enter its secrets again"
        )


def open_credential(credential: Credential | None) -> Mapping[str, str]:
    """Decrypt a credential: environment variable names and values.

    Returns {} for None, the server's own environment. Raises :class:`DecryptionError`.
    """
    if credential is None or not credential.sealed:
        return {}
    return unseal(credential.sealed, name=credential.name)


def seal(values: Mapping[str, str]) -> str:
    """Encrypt variables with the first key."""
    return _keys().encrypt(json.dumps(dict(values), sort_keys=True).encode()).decode()


def unseal(sealed: str, *, name: str) -> dict[str, str]:
    """Decrypt variables. Raises :class:`DecryptionError` with the credential's ``name``."""
    try:
        values: dict[str, str] = json.loads(_keys().decrypt(sealed.encode()))
    except InvalidToken:
        raise DecryptionError(name) from None
    redaction.remember(value for variable, value in values.items() if is_secret(variable))
    return values


def reseal(sealed: str, *, name: str) -> str:
    """Encrypt the same values again, with the first key."""
    try:
        return _keys().rotate(sealed.encode()).decode()
    except InvalidToken:
        raise DecryptionError(name) from None


def _keys() -> MultiFernet:
    return MultiFernet([Fernet(key) for key in settings.CREDENTIALS_KEYS])
