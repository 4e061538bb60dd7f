"""Questions to a bucket and to data before a run exists, for the form and its *Test* button.

Each answers with a list of problems in words; an empty list means that everything is there. The
launch does not trust an earlier answer: what has broken since ends the run with the same words.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from diloco.preflight import preflight
from diloco.rendezvous.workload import STDLIB

LOCAL_SCHEMES = frozenset({"", "file", "local"})
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def check_rendezvous(uri: str, backends: Sequence[str]) -> list[str]:
    """Proves write, read, range read, list, create and delete under ``uri``: what
    ``python -m diloco.preflight`` does, short of the large object and the race."""
    remote = sorted(set(backends) - {"local"})
    parts = urlsplit(uri)
    if remote and (parts.scheme in LOCAL_SCHEMES or parts.hostname in LOOPBACK):
        return [
            f"expected a bucket that replicas on {', '.join(remote)} can reach, "
            f"found {uri}, which only this machine can"
        ]
    report = preflight(uri, quick=True)
    for check in report.missing[:1]:
        if check.name == "open":
            return [f"cannot be opened: {check.detail}"]
        return [f"cannot {check.name} in {report.uri}: {check.detail}"]
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
