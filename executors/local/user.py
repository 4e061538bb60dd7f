"""Local replicas under an account of their own, so that they cannot read the server's keys.

Only a server that runs as root can give a process to another user. It then keeps the state folder
traversable but unreadable (0711), gives the group of that account the rendezvous folder and the
account itself the folder of fetched code and a ``work`` folder in each job. The files by which a
job is supervised stay root's, so that a replica cannot forge them.

Replicas of different runs share the account: they are protected from each other no better than two
programs of one user.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable
from pathlib import Path

SETTING = "ARCHIPELAGO_LOCAL_USER"
SHARED_UMASK = 0o007
"""The server's while such an account is set: the group of a shared folder can write in it."""


def user_problem(name: str) -> str:
    """Why replicas cannot run as ``name``; '' if they can."""
    if os.geteuid() != 0:
        return f"expected a server that runs as root to start replicas as {name}, found uid " + str(
            os.geteuid()
        )
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        return f"expected an account of this machine, found none named {name!r}"
    if found.pw_uid == 0:
        return f"expected an account that is not root, found {name!r}"
    return ""


def unreachable(program: Path) -> str:
    """Why another account cannot start ``program``; '' if it can."""
    found = program.resolve()
    for path in (found, *found.parents):
        if not path.stat().st_mode & 0o001:
            return f"{program} cannot be started by another account: see the permissions of {path}"
    return ""


def account() -> pwd.struct_passwd | None:
    """The account of the environment; None where replicas run as the server."""
    name = os.environ.get(SETTING, "")
    if not name:
        return None
    if problem := user_problem(name):
        raise OSError(f"{SETTING}: {problem}")
    return pwd.getpwnam(name)


def share_state(state: Path, found: pwd.struct_passwd, rendezvous: Iterable[Path] = ()) -> None:
    """Make what replicas need reachable for the account, and nothing else."""
    state.mkdir(parents=True, exist_ok=True)
    for folder in (state, state / "jobs"):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o711)
    code = state / "code"
    code.mkdir(exist_ok=True)
    code.chmod(0o700)
    os.chown(code, found.pw_uid, found.pw_gid)
    for folder in rendezvous:
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, 0, found.pw_gid)
        folder.chmod(0o2770)


def work_folder(job: Path, found: pwd.struct_passwd) -> Path:
    """The replica's current folder, its home and where it keeps temporary files."""
    job.chmod(0o711)
    work = job / "work"
    work.mkdir(exist_ok=True)
    work.chmod(0o700)
    os.chown(work, found.pw_uid, found.pw_gid)
    return work
