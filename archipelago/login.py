"""Which server, and with what token: from the environment, else from a file that only its owner
can read."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from archipelago.errors import LoginNeeded

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, kw_only=True)
class Login:
    url: str
    token: str


def login_file() -> Path:
    """``ARCHIPELAGO_LOGIN``, else ``archipelago/login.json`` in the user's configuration folder."""
    named = os.environ.get("ARCHIPELAGO_LOGIN")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "archipelago" / "login.json"


def read_login() -> Login:
    """``ARCHIPELAGO_URL`` and ``ARCHIPELAGO_TOKEN``, each over what the file has."""
    stored: dict[str, str] = {}
    path = login_file()
    try:
        found = json.loads(path.read_text())
        stored = {name: str(found[name]) for name in ("url", "token")}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoginNeeded(
            f"expected url and token in {path}, found {error!r}: archipelago login URL"
        ) from None
    url = os.environ.get("ARCHIPELAGO_URL") or stored.get("url", "")
    token = os.environ.get("ARCHIPELAGO_TOKEN") or ""
    if not token and url == stored.get("url"):
        token = stored.get("token", "")  # another server's is not for this one
    if not url or not token:
        what = "server" if not url else f"token for {url}"
        raise LoginNeeded(f"no {what} is known yet: archipelago login URL")
    return Login(url=check_url(url), token=token)


def write_login(login: Login) -> Path:
    """Whole or not at all, and never readable by others."""
    path = login_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"url": login.url, "token": login.token}, file)
        made.replace(path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    return path


def forget_login() -> bool:
    path = login_file()
    there = path.exists()
    path.unlink(missing_ok=True)
    return there


def check_url(url: str) -> str:
    """Without its last slash. ``ValueError`` for what is not http or https."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"expected a URL such as https://archipelago.example, found {url!r}")
    return url.rstrip("/").removesuffix("/api")


def is_exposed(url: str) -> bool:
    """A token sent there can be read on the way."""
    parts = urlsplit(url)
    return parts.scheme == "http" and parts.hostname not in LOOPBACK
