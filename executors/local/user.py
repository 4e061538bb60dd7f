"""Local replicas under a separate user account, so that they cannot read the server's keys.

Only a server that runs as root can start processes as another user. It makes the state folder
traversable but unreadable (0711), gives the rendezvous folder to the account's group, and gives the
account the folder of fetched code and a ``work`` folder in each job. The files that supervise a job
remain owned by root, so a replica cannot forge them.

Replicas of different runs share the account and are isolated from each other only as well as two
programs of one user.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable
from pathlib import Path

SETTING = "ARCHIPELAGO_LOCAL_USER"
SHARED_UMASK = 0o007
"""The server's umask while such an account is configured: the group can write to shared folders."""


def user_problem(name: str) -> str:
    """The reason why replicas cannot run as ``name``; empty if they can."""
    if os.geteuid() != 0:
        return f"expected a server that runs as root to start replicas as {name}, found uid " + str(
            os.geteuid()
        )
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return f"expected an account of this machine, found none named {name!r}"
    if entry.pw_uid == 0:
        return f"expected an account that is not root, found {name!r}"
    return ""


def unreachable(program: Path) -> str:
    """The reason why another account cannot start ``program``; empty if it can."""
    target = program.resolve()
    for path in (target, *target.parents):
        if not path.stat().st_mode & 0o001:
            return f"{program} cannot be started by another account: see the permissions of {path}"
    return ""


def account() -> pwd.struct_passwd | None:
    """The account that :data:`SETTING` names; None if replicas run as the server's user."""
    name = os.environ.get(SETTING, "")
    if not name:
        return None
    if problem := user_problem(name):
        raise OSError(f"{SETTING}: {problem}")
    return pwd.getpwnam(name)


def share_state(state: Path, owner: pwd.struct_passwd, rendezvous: Iterable[Path] = ()) -> None:
    """Give the account access to the folders that replicas need, and to nothing else."""
    state.mkdir(parents=True, exist_ok=True)
    for folder in (state, state / "jobs"):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o711)
    code = state / "code"
    code.mkdir(exist_ok=True)
    code.chmod(0o700)
    os.chown(code, owner.pw_uid, owner.pw_gid)
    for folder in rendezvous:
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, 0, owner.pw_gid)
        folder.chmod(0o2770)


def work_folder(job: Path, owner: pwd.struct_passwd) -> Path:
    """Create the replica's working directory, which is also its HOME and TMPDIR."""
    job.chmod(0o711)
    work = job / "work"
    work.mkdir(exist_ok=True)
    work.chmod(0o700)
    os.chown(work, owner.pw_uid, owner.pw_gid)
    return work
