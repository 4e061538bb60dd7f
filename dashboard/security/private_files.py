"""Permissions of all files that the server creates: only its own account can read them.

Every process sets its umask at start. ``serve`` also tightens a state folder that an earlier
version left readable to others, and reports it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from executors.local.user import SETTING, SHARED_UMASK

logger = logging.getLogger(__name__)

PRIVATE_UMASK = 0o077


def set_umask() -> None:
    """Remove all permissions of others; keep those of the group only if local replicas run as
    another account (:mod:`executors.local.user`)."""
    os.umask(SHARED_UMASK if os.environ.get(SETTING) else PRIVATE_UMASK)


def create_once(path: Path, make: Callable[[], str]) -> str:
    """The text of a file that only its owner can read. Of several processes that create it, the
    first one wins and the others read its text."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        temporary.touch(mode=0o600)
        temporary.write_text(make())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()
    return path.read_text()


def exposed(state: Path) -> list[Path]:
    """The state folder, and files in it and its logs, that other accounts can read or write."""
    if not state.is_dir():
        return []
    shared = bool(os.environ.get(SETTING))
    paths = [state] if _mode(state) & (0o066 if shared else 0o077) else []
    for folder in (state, state / "logs"):
        if folder.is_dir() and not folder.is_symlink():
            paths += [
                path
                for path in sorted(folder.iterdir())
                if path.is_file() and not path.is_symlink() and _mode(path) & 0o077
            ]
    return paths


def tighten(state: Path) -> list[Path]:
    """Remove the permissions of others. Returns the changed paths."""
    changed = []
    for path in exposed(state):
        allowed = 0o711 if path == state and os.environ.get(SETTING) else 0o700
        try:
            path.chmod(_mode(path) & allowed | (0o711 & allowed if path == state else 0))
        except OSError as error:
            logger.warning("%s can be read by other accounts: %s", path, error.strerror)
            continue
        changed.append(path)
    return changed


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
