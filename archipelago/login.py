"""The server's URL and token, from environment variables or from a file that only its owner can
read."""

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
    """The login file, overridden by ``ARCHIPELAGO_URL`` and ``ARCHIPELAGO_TOKEN``."""
    stored: dict[str, str] = {}
    path = login_file()
    try:
        stored_login = json.loads(path.read_text())
        stored = {name: str(stored_login[name]) for name in ("url", "token")}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoginNeeded(
            f"expected url and token in {path}, found {error!r}: run archipelago login URL"
        ) from None
    url = os.environ.get("ARCHIPELAGO_URL") or stored.get("url", "")
    token = os.environ.get("ARCHIPELAGO_TOKEN") or ""
    if not token and url == stored.get("url"):
        token = stored.get("token", "")  # never send the token of another server
    if not url or not token:
        what = "server" if not url else f"token for {url}"
        raise LoginNeeded(f"no {what} is configured: run archipelago login URL")
    return Login(url=check_url(url), token=token)


def write_login(login: Login) -> Path:
    """Write the login file atomically, readable only by its owner."""
    path = login_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"url": login.url, "token": login.token}, file)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def forget_login() -> bool:
    """Delete the login file. Returns whether there was one."""
    path = login_file()
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed


def check_url(url: str) -> str:
    """The URL without a trailing slash. Raises ``ValueError`` unless it is http or https."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"expected a URL such as https://archipelago.example, found {url!r}")
    return url.rstrip("/").removesuffix("/api")


def is_exposed(url: str) -> bool:
    """Whether a token sent to this URL can be intercepted."""
    parts = urlsplit(url)
    return parts.scheme == "http" and parts.hostname not in LOOPBACK
