"""The canonical form of a rendezvous URI: every location has exactly one spelling.

Two runs must not share a prefix, and one prefix must not contain another. Both checks compare text,
so every location needs exactly one URI. :func:`canonical` rewrites a URI to that form, or rejects
it if the location is ambiguous:

- The scheme is in lower case, and the most common one of its kind (``s3a`` becomes ``s3``, ``gcs``
  becomes ``gs``, ``abfs`` and ``abfss`` become ``az``, ``local`` becomes ``file``). A path without
  a scheme is a folder.
- Folders are absolute and resolved: no ``.``, ``..``, ``//`` and no symbolic link. The characters
  of a ``file://`` URI are percent-encoded as :func:`file_uri` does it. A bind mount, or a file
  system that ignores case, can still give one folder two names.
- Bucket names are in lower case, as S3, Google and Azure require. An upper-case name would be
  another bucket to a server that reads it from the path, and the same bucket where it is a host
  name.
- Below a bucket, ``//``, ``.``, ``..``, percent-encoding and backslashes are rejected: some clients
  rewrite them and others do not.
- A query, a fragment, a user, and a port are always rejected.

Not detected: two endpoints, accounts, or access points of the same bucket.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote_from_bytes, unquote_to_bytes

FILE = "file"
SCHEMES = {
    **dict.fromkeys(("file", "local"), FILE),
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "az"),
    "hf": "hf",
}
"""Scheme of a URI -> the scheme of its canonical form."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_DOUBLE_SLASH = re.compile(rf"(?:{'|'.join(SCHEMES)}):?//", re.IGNORECASE)
_BUCKET = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,253}[a-z0-9])?")
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_HUB_KINDS = ("datasets", "models", "spaces", "buckets")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")


class BadLocation(ValueError):
    """The URI does not identify one location; the message gives the reason."""


@dataclass(frozen=True, kw_only=True)
class Location:
    """A location in canonical form.

    ``bucket`` is the bucket, the container, or the repository on the Hub; empty for a folder.
    ``path`` is the prefix below it, without leading and trailing slashes; for a folder, the
    absolute path without its first slash.
    """

    scheme: str
    bucket: str
    path: str

    @property
    def uri(self) -> str:
        if self.scheme == FILE:
            return file_uri(f"/{self.path}")
        return "/".join(filter(None, (f"{self.scheme}://{self.bucket}", self.path)))

    @property
    def folder(self) -> Path:
        """The folder of a ``file`` location. Raises :class:`ValueError` for any other."""
        if self.scheme != FILE:
            raise ValueError(f"expected a folder, found {self.uri}")
        return Path(f"/{self.path}")

    @property
    def parents(self) -> tuple[Location, ...]:
        """The locations that contain this one, nearest first."""
        parts = self.path.split("/") if self.path else []
        return tuple(
            Location(scheme=self.scheme, bucket=self.bucket, path="/".join(parts[:count]))
            for count in range(len(parts) - 1, -1, -1)
        )

    def contains(self, other: Location) -> bool:
        """Return whether ``other`` is this location or a prefix inside it."""
        if (self.scheme, self._bucket) != (other.scheme, other._bucket):
            return False
        return not self.path or f"{other.path}/".startswith(f"{self.path}/")

    def overlaps(self, other: Location) -> bool:
        """Return whether an object could belong to both locations."""
        return self.contains(other) or other.contains(self)

    @property
    def _bucket(self) -> str:
        """The name as the service compares it: the Hub ignores the case of a repository's name."""
        return self.bucket.lower()


def canonical(uri: str, *, resolve: bool = True) -> Location:
    """Return the location of ``uri``. Raises :class:`BadLocation`.

    Reads the symbolic links of folders and nothing else. ``resolve`` False reads nothing; use it
    for a URI that was canonical when it was stored.
    """
    if not uri:
        raise BadLocation("expected a URI or a path, found an empty text")
    if _UNPRINTABLE.search(uri):
        raise BadLocation(f"expected a URI without control characters, found {uri!r}")
    match = _SCHEME.match(uri)
    if match is None:
        return _plain_path(uri, resolve)
    scheme, rest = match[1].lower(), uri[match.end() :]
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in sorted(set(SCHEMES.values())))
        raise BadLocation(f"expected a URI of {known} or a path, found {uri!r}")
    if "?" in rest or "#" in rest:
        raise BadLocation(f"expected a URI without a query and a fragment, found {uri!r}")
    if SCHEMES[scheme] == FILE:
        return _file(uri, rest, resolve)
    if not rest.startswith("//"):
        raise BadLocation(f"expected {scheme}://bucket/prefix, found {uri!r}")
    if "%" in rest or "\\" in rest:
        raise BadLocation(
            f"expected a bucket's URI without percent-encoding and backslashes, found {uri!r}"
        )
    if "@" in rest.removeprefix("//").partition("/")[0] or (scheme == "hf" and "@" in rest):
        raise BadLocation(  # without the URI: the text before '@' can contain a password
            "expected a URI without a user, account, or revision ('@'); give them by a credential"
        )
    return _bucket(uri, SCHEMES[scheme], rest.removeprefix("//"))


def file_uri(path: str | Path) -> str:
    """The ``file://`` URI of an absolute path."""
    return f"file://{quote_from_bytes(os.fsencode(path), safe='/')}"


def _plain_path(path: str, resolve: bool) -> Location:
    if _DOUBLE_SLASH.match(path):
        raise BadLocation(f"expected s3://bucket/prefix or a path, found {path!r}")
    return _folder(path, resolve)


def _file(uri: str, rest: str, resolve: bool) -> Location:
    host, path = "", rest
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        path = slash + path
    if host.lower() not in ("", "localhost") or not path.startswith("/"):
        raise BadLocation(f"expected file:///absolute/path, found {uri!r}")
    decoded = unquote_to_bytes(path)
    if b"\0" in decoded:
        raise BadLocation(f"expected a path without a NUL, found {uri!r}")
    return _folder(os.fsdecode(decoded), resolve)


def _folder(path: str, resolve: bool) -> Location:
    resolved = os.path.realpath(path) if resolve else os.path.normpath(path)
    return Location(scheme=FILE, bucket="", path=resolved.strip("/"))


def _bucket(uri: str, scheme: str, rest: str) -> Location:
    parts = rest.rstrip("/").split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise BadLocation(f"expected a URI without empty parts, '.', and '..', found {uri!r}")
    if scheme == "hf":
        return _hub(uri, parts)
    bucket, *prefix = parts
    if not _BUCKET.fullmatch(bucket):
        raise BadLocation(
            f"expected a bucket named in lower-case letters, digits, '.', '_', and '-', without a "
            f"port, found {bucket!r} in {uri!r}"
        )
    return Location(scheme=scheme, bucket=bucket, path="/".join(prefix))


def _hub(uri: str, parts: list[str]) -> Location:
    """Parse a Hub URI; ``hf://user/name/...`` is a model, as is ``hf://models/user/name/...``."""
    kind = parts[0].lower() if parts[0].lower() in _HUB_KINDS else "models"
    names = parts[1:] if parts[0].lower() in _HUB_KINDS else parts
    if len(names) < 2 or not all(_HUB_NAME.fullmatch(name) for name in names[:2]):
        raise BadLocation(f"expected hf://datasets/user/name/prefix, found {uri!r}")
    repository = "/".join(names[:2]) if kind == "models" else "/".join((kind, *names[:2]))
    return Location(scheme="hf", bucket=repository, path="/".join(names[2:]))
