"""Checks that the server can read a run's data, without revealing other files of this machine.

Local paths are checked only below a data root (``ARCHIPELAGO_DATA_ROOTS``); elsewhere the answer
does not depend on whether the file exists. Buckets are read by their own clients, HTTP by
:mod:`runs.outbound`. Other fsspec schemes and chained URLs are refused: they reach addresses and
files that are not checked here.
"""

# Paths can contain patterns here, which pathlib would normalise.
# ruff: noqa: PTH112, PTH113, PTH117, PTH118, PTH120, PTH202, PTH207

from __future__ import annotations

import glob
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from urllib.parse import unquote, urlsplit

from django.conf import settings

from diloco.protocol.workload import STDLIB
from runs import outbound

LOCAL = frozenset({"", "file", "local"})
BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf"})
WEB = frozenset({"http", "https"})
FILES = 1000
"""Files of a folder or pattern that are checked."""
TIMEOUT_S = 5.0
EXPECTED = f"expected {STDLIB!r} or a URI of text files that can be read"


def refuse_data(uri: str) -> str:
    """Why data at ``uri`` is refused because of its address; '' if it is not. Reads nothing."""
    if uri == STDLIB:
        return ""
    if "::" in uri or "\0" in uri:
        return f"{EXPECTED}, found {uri!r}: URLs cannot be chained"
    scheme = urlsplit(uri).scheme.lower()
    if scheme in LOCAL:
        return _refuse_local(uri)
    if scheme in WEB:
        try:
            outbound.check_url(uri)
        except ValueError as error:
            return f"{EXPECTED}: {error}"
        return ""
    if scheme not in BUCKETS:
        known = ", ".join(sorted({"file"} | BUCKETS | WEB))
        return f"{EXPECTED}, of {known}, found {scheme}://"
    return ""


def _refuse_local(uri: str) -> str:
    if "**" in uri:
        return f"{EXPECTED}, found '**', which searches whole trees: name the folder"
    path = local_path(uri)
    if ".." in _after_pattern(path):
        return f"{EXPECTED}, found '..' after a pattern: name the folder"
    if _root_of(path) is None:
        roots = ", ".join(map(str, settings.DATA_ROOTS)) or "none"
        return (
            f"{EXPECTED}, found a path outside of the data folders of this server ({roots}): "
            "an administrator can add one in ARCHIPELAGO_DATA_ROOTS"
        )
    return ""


def local_path(uri: str) -> str:
    if "://" not in uri:
        return uri
    return unquote(uri.partition("://")[2])


def _root_of(path: str) -> Path | None:
    """The data root that contains ``path`` with all links resolved. Patterns are at its end."""
    if not os.path.isabs(path):
        return None
    fixed = path
    while any(c in fixed for c in "*?["):
        fixed = os.path.dirname(fixed)
    return _root_holding(fixed)


def _root_holding(path: str) -> Path | None:
    """The data root that contains exactly this path with all links resolved."""
    resolved = Path(os.path.realpath(path))
    for root in settings.DATA_ROOTS:
        if resolved.is_relative_to(os.path.realpath(root)):
            return Path(root)
    return None


def _after_pattern(path: str) -> list[str]:
    """The parts of a path after its first pattern. A '..' there leaves the matched folder, and the
    result would reveal whether files outside the root exist."""
    parts = path.split("/")
    return next((parts[n:] for n, part in enumerate(parts) if any(c in part for c in "*?[")), [])


def local_data_problem(uri: str) -> str:
    """Check data below a data root; return '' if some file has text."""
    path = local_path(uri)
    # A link below the root can point outside of it; such a file is ignored.
    files = [name for name in islice(_files(path), FILES) if _root_holding(name) is not None]
    if not files:
        return f"{EXPECTED}, found nothing at {uri}"
    for name in files:
        if os.path.isfile(name) and os.path.getsize(name):
            return "" if os.access(name, os.R_OK) else f"{EXPECTED}, found {uri} unreadable"
    return f"{EXPECTED}, found only empty files at {uri}"


def _files(path: str) -> Iterator[str]:
    if any(c in path for c in "*?["):
        yield from glob.iglob(path)
    elif os.path.isdir(path):
        for folder, _, names in islice(os.walk(path), FILES):
            yield from (os.path.join(folder, name) for name in names)
    elif os.path.isfile(path):
        yield path


def web_data_problem(uri: str) -> str:
    """Request the first byte. The answer contains the status, never the content."""
    request = urllib.request.Request(uri, headers={"Range": "bytes=0-0"})  # noqa: S310 -- checked
    try:
        with outbound.open_url(request, timeout_s=TIMEOUT_S, redirects=True) as response:
            return "" if response.read(1) else f"{EXPECTED}, found nothing at {uri}"
    except urllib.error.HTTPError as error:
        with error:
            return f"{EXPECTED}, found HTTP status {error.code} at {uri}"
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, outbound.AddressRefused):
            return f"{EXPECTED}: {reason}"
        return f"{EXPECTED}, found no answer from {uri}"
