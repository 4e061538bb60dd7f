"""The setup token: it authorizes the creation of the first administrator.

``serve`` prints a URL with the token, ``manage.py setup_token`` the token alone. It is stored in
the state folder, readable only by the server's account, or in ``ARCHIPELAGO_SETUP_TOKEN`` if web
servers share no folder. It is deleted once the first administrator exists.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from django.conf import settings
from django.contrib.auth.models import User

from dashboard.security.private_files import create_once

VARIABLE = "ARCHIPELAGO_SETUP_TOKEN"
NAME = "setup_token"


def is_needed() -> bool:
    return not User.objects.exists()


def setup_token() -> str:
    """The token. It is generated on the first call."""
    if value := os.environ.get(VARIABLE):
        return value
    return create_once(_path(), lambda: secrets.token_urlsafe(32))


def matches(text: str) -> bool:
    """Whether ``text`` is the token. Compares in constant time."""
    return hmac.compare_digest(text.strip().encode(errors="replace"), setup_token().encode())


def forget() -> None:
    _path().unlink(missing_ok=True)


def _path() -> Path:
    return Path(settings.VAR_DIR) / NAME
