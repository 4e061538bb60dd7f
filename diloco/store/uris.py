"""Checks that a rendezvous given by a user names a location that other machines can reach.

A misspelt bucket is a valid relative path, and a replica that trains alone in such a folder looks
healthy. Anything but an absolute folder or a URI of a known scheme is therefore rejected.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "file", "local", "memory")
_FOLDERS = ("file", "local")
_ENTER = "Enter a URI such as s3://bucket/run or an absolute folder such as /mnt/shared/run"


def check_rendezvous(uri: str, *, relative: bool = False) -> str:
    """Return ``uri``. Raises :class:`ValueError` with a hint what to enter. ``relative`` accepts a
    relative folder where the text does not look like a URI."""
    text = uri.strip()
    if not text or text != uri:
        raise ValueError(f"rendezvous: expected a URI or a folder, found {uri!r}. {_ENTER}")
    scheme = urlsplit(uri).scheme
    if re.match(r"^[A-Za-z][A-Za-z0-9+.-]*://", uri) is None:
        prefix = re.match(r"^([A-Za-z0-9]+)(?::|:/|/)?/(?=[^/])", uri)
        if prefix and prefix[1].lower() in SCHEMES:
            raise ValueError(
                f"rendezvous: expected {prefix[1].lower()}://..., found {uri!r}. {_ENTER}"
            )
        if not relative and not Path(uri).is_absolute():
            raise ValueError(
                f"rendezvous: expected an absolute folder or a URI, found {uri!r}, which is a "
                f"different folder on every machine and in every working directory. {_ENTER}"
            )
        return uri
    if scheme not in SCHEMES:
        raise ValueError(
            f"rendezvous: expected a scheme of {', '.join(SCHEMES)}, found {scheme!r} in {uri!r}. "
            f"{_ENTER}"
        )
    parts = urlsplit(uri)
    if scheme in _FOLDERS:
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ValueError(
                f"rendezvous: expected {scheme}:///absolute/folder, found {uri!r}. {_ENTER}"
            )
    elif not parts.netloc:
        raise ValueError(
            f"rendezvous: expected a bucket after {scheme}://, found {uri!r}. {_ENTER}"
        )
    return uri
