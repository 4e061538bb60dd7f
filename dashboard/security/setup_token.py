"""The set-up token: whoever creates the first administrator must know it.

``serve`` prints the address with the token, ``manage.py setup_token`` the token alone. It is in the
state folder, readable by the server's account only, or in ``ARCHIPELAGO_SETUP_TOKEN`` where web
servers share no folder, and is removed when the first administrator exists.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from pathlib import Path

from django.conf import settings
from django.contrib.auth.models import User

VARIABLE = "ARCHIPELAGO_SETUP_TOKEN"
NAME = "setup_token"


def is_needed() -> bool:
    return not User.objects.exists()


def setup_token() -> str:
    """The token; made when it is first asked for."""
    if given := os.environ.get(VARIABLE):
        return given
    path = _path()
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f".{NAME}.{secrets.token_hex(4)}")
    made.touch(mode=0o600)
    made.write_text(secrets.token_urlsafe(32))
    try:
        os.link(made, path)  # of several processes the first wins
    except FileExistsError:
        pass
    finally:
        made.unlink()
    return path.read_text()


def matches(text: str) -> bool:
    """Whether ``text`` is the token, in constant time."""
    return hmac.compare_digest(text.strip().encode(errors="replace"), setup_token().encode())


def forget() -> None:
    _path().unlink(missing_ok=True)


def _path() -> Path:
    return Path(settings.VAR_DIR) / NAME
