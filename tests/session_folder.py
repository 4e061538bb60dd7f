"""A temporary folder of this test process.

Its name holds the process id, so the next session can remove the folders of killed processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "archipelago-test-"


def session_folder() -> Path:
    """A new folder with a short path: the path of a Unix socket is limited to 107 bytes."""
    remove_stale(Path(tempfile.gettempdir()))
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))


def remove_stale(parent: Path) -> None:
    """Remove the folders of processes that no longer run."""
    for folder in parent.glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdigit() and not is_running(int(pid)) and folder.stat().st_uid == os.geteuid():
                shutil.rmtree(folder, ignore_errors=True)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
