"""Opens the store of a rendezvous URI."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from diloco.store.base import CannotOpen, LocalStore, Store, StoreDenied
from diloco.store.freed_parts import return_freed_parts
from diloco.store.location import FILE, SCHEMES, BadLocation, canonical


def open_store(
    uri: str, *, coordinator: bool = False, environment: Mapping[str, str] | None = None
) -> Store:
    """Open the store of a rendezvous URI: ``file://`` or a plain path, or any URI that fsspec
    opens.

    ``coordinator``: this process is the coordinator of a store without a conditional write, the
    only process that creates objects; only then does ``create`` check and then write.
    ``environment``: variables of a credential (:mod:`diloco.store.credentials`), used instead of
    the process's environment; None uses the process's environment.

    The first call changes settings of the C library (:mod:`diloco.store.freed_parts`).

    Raises :class:`StoreDenied` for a URI that cannot be opened.
    """
    return_freed_parts()
    scheme = urlsplit(uri).scheme
    if SCHEMES.get(scheme, scheme) in ("", FILE):
        if environment is not None:
            raise StoreDenied(f"{uri}: expected a bucket to open with a credential, found a folder")
        try:
            return LocalStore(canonical(uri).folder)
        except BadLocation as error:
            raise CannotOpen(str(error)) from None
    uri = f"{scheme}{uri[len(scheme) :]}"  # clients expect a scheme in lower case
    from diloco.store.remote import open_remote

    return open_remote(uri, coordinator=coordinator, environment=environment)
