"""One open store per rendezvous, credential and process.

Opened after the fork, because clients of object stores do not survive one, and kept, because each
opening costs connections. A run's credential opens it and nothing of the server's own environment
does; a credential that was changed makes a new client.
"""

from __future__ import annotations

import os
from functools import lru_cache

from diloco.rendezvous.location import BadLocation, canonical
from diloco.rendezvous.store import Store, StoreDenied, open_store
from runs.credentials import CannotOpen
from runs.credentials.vault import unseal
from runs.models import Run


def store_for(run: Run) -> Store:
    """Raises :class:`StoreDenied` where the run's credential cannot be opened."""
    credential = run.store_credential
    if credential is None:
        return _open(os.getpid(), run.rendezvous, "", "")
    return _open(os.getpid(), run.rendezvous, credential.sealed, credential.name)


@lru_cache(maxsize=64)
def _open(pid: int, uri: str, sealed: str, name: str) -> Store:
    """Kept by what is sealed, not by what is in it: these keys are in memory for long."""
    try:
        environment = unseal(sealed, name=name) if sealed else None
    except CannotOpen as error:
        raise StoreDenied(str(error)) from None
    _check_no_link(uri)
    return open_store(uri, environment=environment or None)


def _check_no_link(uri: str) -> None:
    """A run's folder is stored with links resolved: one that is there now leads elsewhere."""
    try:
        wanted, found = canonical(uri, resolve=False), canonical(uri)
    except BadLocation as error:
        raise StoreDenied(str(error)) from None
    if wanted != found:
        raise StoreDenied(
            f"{uri}: expected a folder, found a symbolic link on the way to it, which leads to "
            f"{found.folder}"
        )
