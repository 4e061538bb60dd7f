"""File permissions of everything the server creates: for its own account alone.

Every process sets its umask at its start. ``serve`` also tightens a state folder that an earlier
version left readable to others, and reports it.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from executors.local.user import SETTING, SHARED_UMASK

logger = logging.getLogger(__name__)

PRIVATE_UMASK = 0o077


def set_umask() -> None:
    """No permissions for others; for the group only where local replicas have an account of their
    own (:mod:`executors.local.user`)."""
    os.umask(SHARED_UMASK if os.environ.get(SETTING) else PRIVATE_UMASK)


def exposed(state: Path) -> list[Path]:
    """The state folder, and files in it and its logs, that other accounts can read or write."""
    if not state.is_dir():
        return []
    shared = bool(os.environ.get(SETTING))
    found = [state] if _mode(state) & (0o066 if shared else 0o077) else []
    for folder in (state, state / "logs"):
        if folder.is_dir() and not folder.is_symlink():
            found += [
                path
                for path in sorted(folder.iterdir())
                if path.is_file() and not path.is_symlink() and _mode(path) & 0o077
            ]
    return found


def tighten(state: Path) -> list[Path]:
    """Remove permissions of others; what was changed."""
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
