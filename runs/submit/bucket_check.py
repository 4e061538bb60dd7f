"""Checks a bucket and training data before a run exists.

Each check returns a list of problems as text; an empty list means success.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from fsspec.utils import glob_translate

from diloco.preflight import preflight
from diloco.protocol.ownership import PrefixTaken, check_empty
from diloco.protocol.workload import STDLIB
from diloco.store.base import StoreError
from diloco.store.credentials import family_of
from diloco.store.fsspec_pages import pages_of
from diloco.store.location import BadLocation, canonical
from diloco.store.open import open_store
from runs.backends.executors import capabilities_of
from runs.credentials import DecryptionError, check_store, store_environment
from runs.models import Credential
from runs.redaction import redact
from runs.submit.data_check import WEB, local_data_problem, refuse_data, web_data_problem
from runs.submit.prefixes import not_allowed

DATA_LISTED = 10_000
"""Objects at a data URI that are listed to find a readable one."""
LOCAL_SCHEMES = frozenset({"", "file", "local"})

# Environment variables that set a store's endpoint. The first one set wins, as in the clients.
_ENDPOINTS = {
    "s3": ("FSSPEC_S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("STORAGE_EMULATOR_HOST",),
    "az": ("AZURE_STORAGE_CONNECTION_STRING",),
    "hf": ("HF_ENDPOINT",),
}


def remote_backends(backends: Sequence[str]) -> list[str]:
    """The backends whose jobs run on other machines."""
    remote = sorted(set(backends) - settings.LOOPBACK_BACKENDS)
    return [backend for backend in remote if capabilities_of(backend).remote]


def local_address(uri: str, backends: Sequence[str], *, store: Credential | None = None) -> str:
    """The address that jobs on ``backends`` cannot reach because it is local to this machine; ''
    if they can reach it.

    The address of a bucket is its endpoint: from the credential ``store``, or without one, from
    this process's environment.
    """
    if not remote_backends(backends):
        return ""
    parts = urlsplit(uri)
    if parts.scheme in LOCAL_SCHEMES or _is_loopback(parts.hostname):
        return uri
    try:
        endpoint = _endpoint(uri, store_environment(store) or os.environ)
    except DecryptionError:
        return ""  # opening the bucket reports this error
    return f"{uri} at {endpoint}" if _is_loopback(_host(endpoint)) else ""


def _endpoint(uri: str, environment: Mapping[str, str]) -> str:
    names = _ENDPOINTS.get(family_of(uri), ())
    result = next((environment[name] for name in names if environment.get(name)), "")
    for part in result.split(";"):  # only this part of a connection string is an address
        name, _, value = part.partition("=")
        if name == "BlobEndpoint":
            return value
    return "" if ";" in result else result


def _host(endpoint: str) -> str | None:
    return urlsplit(endpoint if "//" in endpoint else f"//{endpoint}").hostname


def _is_loopback(host: str | None) -> bool:
    if not host:
        return False
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def check_rendezvous(
    uri: str, backends: Sequence[str], *, store: Credential | None = None
) -> list[str]:
    """Check write, read, range read, list, create and delete under ``uri``.

    This is ``python -m diloco.preflight`` without the large object and the race. Nothing is written
    unless a run can use the prefix and the prefix is empty. Nothing is left behind.
    """
    if local := local_address(uri, backends, store=store):
        names = ", ".join(remote_backends(backends))
        return [
            f"expected a bucket that replicas on {names} can reach, "
            f"found {local}, which only this machine can"
        ]
    if store is not None and (problem := check_store(store, uri)):
        return [problem]
    try:
        environment = store_environment(store)
    except DecryptionError as error:
        return [str(error)]
    if problem := _unusable_reason(uri, environment):
        return [redact(problem)]
    problem = missing_operation(uri, environment)
    return [redact(problem)] if problem else []


def missing_operation(uri: str, environment: Mapping[str, str] | None) -> str:
    """The first operation that the store at ``uri`` refuses, with the reason; '' if all succeed."""
    report = preflight(uri, quick=True, environment=environment)
    for check in report.missing[:1]:
        if check.name == "open":
            return f"cannot be opened: {check.detail}"
        needs = f" (needs {check.needs})" if check.needs else ""
        return f"cannot {check.name} in {report.uri}: {check.detail}{needs}"
    return ""


def _unusable_reason(uri: str, environment: Mapping[str, str] | None) -> str:
    """Why no run can use ``uri``, whatever the store permits; '' if one can."""
    try:
        location = canonical(uri)
    except BadLocation as error:
        return f"cannot be opened: {error}"
    if problem := not_allowed(location):
        return problem
    try:
        check_empty(open_store(location.uri, environment=environment))
    except PrefixTaken as error:
        return str(error)
    except (StoreError, ValueError, ImportError):
        pass  # the following checks report what is denied
    return ""


def _first_files(fs: Any, path: str) -> tuple[list[tuple[str, int]], bool]:
    """Path and size of files at ``path`` (a file, a folder or a pattern).

    Listing stops at the page with the first non-empty file. The flag is True if the result is
    complete; a bucket can hold any number of files.
    """
    if not any(c in path for c in "*?["):
        try:
            info = fs.info(path)
        except FileNotFoundError:
            return [], True
        if info["type"] == "file":
            return [(path, int(info.get("size") or 0))], True
    parts = list(takewhile(lambda part: not set(part) & set("*?["), path.split("/")))
    root = "/".join(parts)
    matches = re.compile(glob_translate(path)).match if root != path else re.compile("").match
    files: list[tuple[str, int]] = []
    read = 0
    for page in pages_of(fs, root, {}):
        files += [(name, size_bytes) for name, size_bytes in page if matches(name)]
        read += len(page)
        if any(size_bytes for _, size_bytes in files):
            break
        if read >= DATA_LISTED:
            return files[:DATA_LISTED], False
    return files, True


def check_data(uri: str, backends: Sequence[str] = ()) -> list[str]:
    """Check that there is readable text at a data URI (a file, a folder or a pattern)."""
    if uri == STDLIB:
        return []
    from fsspec.core import url_to_fs

    expected = f"expected {STDLIB!r} or a URI of text files that can be read"
    if local := local_address(uri, backends):
        names = ", ".join(remote_backends(backends))
        return [f"{expected} by replicas on {names}, found {local}, which only this machine can"]
    if problem := refuse_data(uri):
        return [problem]
    scheme = urlsplit(uri).scheme.lower()
    if scheme in LOCAL_SCHEMES:
        return [problem] if (problem := local_data_problem(uri)) else []
    if scheme in WEB:
        return [problem] if (problem := web_data_problem(uri)) else []
    try:
        fs, path = url_to_fs(uri)
        files, is_complete = _first_files(fs, str(path).rstrip("/"))
        for name, size_bytes in sorted(files):
            if size_bytes and fs.cat_file(name, start=0, end=1):
                return []
        suffix = "" if is_complete else f" among the first {DATA_LISTED} objects"
        return [f"{expected}, found {'only empty files' if files else 'nothing'} at {uri}{suffix}"]
    except Exception as error:  # each file system raises its own exceptions
        return [redact(f"{expected}, found {type(error).__name__} at {uri}: {error}")]
