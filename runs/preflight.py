"""Questions to a bucket and to data before a run exists, for the form and its *Test* button.

Each answers with a list of problems in words; an empty list means that everything is there. The
launch does not trust an earlier answer: what has broken since ends the run with the same words.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from diloco.rendezvous.store import Store, StoreError, open_store
from diloco.rendezvous.workload import STDLIB

LOCAL_SCHEMES = frozenset({"", "file", "local"})
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

_BODY = b"archipelago preflight"


def check_rendezvous(uri: str, backends: Sequence[str]) -> list[str]:
    """Proves write, read, range read, list, atomic create and delete under ``uri``."""
    remote = sorted(set(backends) - {"local"})
    parts = urlsplit(uri)
    if remote and (parts.scheme in LOCAL_SCHEMES or parts.hostname in LOOPBACK):
        return [
            f"expected a bucket that replicas on {', '.join(remote)} can reach, "
            f"found {uri}, which only this machine can"
        ]
    try:
        store = open_store(uri)
    except (StoreError, ValueError, ImportError) as error:
        return [f"cannot be opened: {error}"]
    key = f"preflight/{secrets.token_hex(8)}"
    try:
        return _verbs(store, key)
    finally:
        with contextlib.suppress(StoreError):
            store.delete([key, f"{key}.create"])


def _verbs(store: Store, key: str) -> list[str]:
    created = f"{key}.create"
    checks: list[tuple[str, Callable[[], Any], Any]] = [
        ("write", lambda: store.put(key, _BODY), None),
        ("read", lambda: store.get(key), _BODY),
        ("read a range", lambda: store.get_range(key, 5, 4), _BODY[5:9]),
        ("list", lambda: key in {info.key for info in store.list("preflight/")}, True),
        ("create", lambda: store.create(created, _BODY), True),
        ("refuse to create twice", lambda: store.create(created, b"other"), False),
        ("delete", lambda: store.delete([key, created]), None),
    ]
    for verb, call, expected in checks:
        try:
            found = call()
        except StoreError as error:
            return [f"cannot {verb} in {store.uri}: {error}"]
        if found != expected:
            return [f"cannot {verb} in {store.uri}: expected {expected!r}, found {found!r}"]
    return []


def check_data(uri: str) -> list[str]:
    """Whether there is text to read at a data URI (a file, a folder or a glob)."""
    if uri == STDLIB:
        return []
    from fsspec.core import url_to_fs

    expected = f"expected {STDLIB!r} or a URI of text files that can be read"
    try:
        fs, path = url_to_fs(uri)
        names = fs.glob(path) if any(c in path for c in "*?[") else fs.find(path)
        if not names:
            return [f"{expected}, found nothing at {uri}"]
        for name in sorted(names):
            if fs.cat_file(name, start=0, end=1):
                return []
        return [f"{expected}, found only empty files at {uri}"]
    except Exception as error:  # every file system raises its own
        return [f"{expected}, found {type(error).__name__} at {uri}: {error}"]
