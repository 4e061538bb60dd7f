"""Open the store of a rendezvous URI."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from diloco.store.base import LocalStore, Store, StoreDenied
from diloco.store.location import FILE, SCHEMES, BadLocation, canonical


def open_store(
    uri: str, *, sole_creator: bool = False, environment: Mapping[str, str] | None = None
) -> Store:
    """The store for a rendezvous URI: ``file://`` or a plain path, or any URI fsspec opens.

    ``sole_creator`` says that this process is the one designated committer of a store without an
    atomic create: there, and only so, its ``create`` looks whether the key exists, then writes.
    ``environment`` has the variables of a credential (:mod:`diloco.store.credentials`), and
    then nothing of this process's own is used; None means this process's own.
    """
    scheme = urlsplit(uri).scheme
    if SCHEMES.get(scheme, scheme) in ("", FILE):
        if environment is not None:
            raise StoreDenied(f"{uri}: expected a bucket to open with a credential, found a folder")
        try:
            return LocalStore(canonical(uri).folder)
        except BadLocation as error:
            raise StoreDenied(str(error)) from None
    uri = f"{scheme}{uri[len(scheme) :]}"  # in lower case, as clients expect it
    from diloco.store.remote import open_remote

    return open_remote(uri, sole_creator=sole_creator, environment=environment)
