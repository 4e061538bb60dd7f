"""``python -m diloco.preflight URI``: check that a bucket supports every request of a run.

Each check sends the real request for a random key below ``preflight/`` of the run's prefix. All
objects and folders created are deleted afterwards, also after SIGINT and SIGTERM; objects left by a
killed process are deleted when a run is launched in the prefix. A check is skipped if one that it
depends on has failed. Exit status: 0 all checks passed, 1 a check failed, 2 invalid arguments.
Speed is not measured; see ``bench/store_speed.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from diloco.clock import Clock, SystemClock
from diloco.command_line import add_common_options
from diloco.protocol import keys
from diloco.store.base import PART_BYTES, LocalStore, Store, StoreError, StoreUnavailable
from diloco.store.open import open_store

RACERS = 8
NO_ANSWER = (
    "an answer from the store: check network, endpoint and proxy (this is not about permissions)"
)

_BODY = b"archipelago preflight"
_TAIL = b"the end"

_CONDITIONAL = "conditional writes (If-None-Match) on the server"
_S3 = {
    "write": "s3:PutObject",
    "read": "s3:GetObject",
    "read a range": "s3:GetObject",
    "list": "s3:ListBucket on the bucket, for the prefix",
    "write in parts": "s3:PutObject and s3:AbortMultipartUpload",
    "delete": "s3:DeleteObject",
}
_GCS = {
    "write": "storage.objects.create and storage.objects.delete, to replace",
    "read": "storage.objects.get",
    "read a range": "storage.objects.get",
    "list": "storage.objects.list",
    "write in parts": "storage.objects.create",
    "delete": "storage.objects.delete",
}
_AZURE = dict.fromkeys(_S3, "the role Storage Blob Data Contributor on the container")
_HUB = dict.fromkeys(_S3, "a token with write access to the repository, in HF_TOKEN")
_FOLDER = dict.fromkeys(_S3, "a folder this user may write, with hard links")
_NEEDS = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GCS),
    **dict.fromkeys(("az", "abfs", "abfss"), _AZURE),
    "hf": _HUB,
    **dict.fromkeys(("", "file", "local"), _FOLDER),
}


@dataclass(frozen=True)
class Check:
    """Result of one check; ``needs`` is the missing permission or feature, where known."""

    name: str
    ok: bool
    detail: str
    seconds: float
    needs: str = ""


@dataclass(frozen=True)
class Report:
    uri: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def missing(self) -> list[Check]:
        return [check for check in self.checks if not check.ok]


def preflight(
    uri: str,
    *,
    quick: bool = False,
    environment: Mapping[str, str] | None = None,
    clock: Clock | None = None,
) -> Report:
    """Run all checks on the bucket at ``uri``.

    ``quick`` skips the large object and the race (16 MiB and eight more requests) and stops at the
    first failure. ``environment``: see :func:`~diloco.store.open.open_store`.
    """
    clock = clock or SystemClock()
    started_s = clock.monotonic()
    try:
        store = open_store(uri, environment=environment)
    except (StoreError, ValueError, ImportError) as error:
        return Report(uri, (Check("open", False, str(error), clock.monotonic() - started_s),))
    key = keys.preflight(secrets.token_hex(8))
    created = _missing_folders(store)
    needs = _NEEDS.get(urlsplit(uri).scheme, {})
    done: list[Check] = []
    failed: set[str] = set()
    try:
        for name, depends_on, call in _checks(store, key, quick=quick):
            if depends_on & failed:
                failed.add(name)
                detail = f"skipped without: {', '.join(sorted(depends_on & failed))}"
                done.append(Check(name, False, detail, 0.0))
                continue
            check = _try(name, call, clock, needs.get(name, _CONDITIONAL))
            done.append(check)
            if not check.ok:
                failed.add(name)
                if quick:
                    break
    finally:
        # By key, because listing can be the permission that is missing.
        with contextlib.suppress(StoreError):
            store.delete(_keys(key))
        with contextlib.suppress(OSError):
            for folder in created:
                folder.rmdir()  # fails for a folder that another process has started to use
    return Report(store.uri, tuple(done))


def _missing_folders(store: Store) -> list[Path]:
    """Return the folders that a first write would create, innermost first."""
    if not isinstance(store, LocalStore):
        return []
    return [folder for folder in (store.root, *store.root.parents) if not folder.exists()]


def _keys(key: str) -> list[str]:
    nonce = key.removeprefix(keys.PREFLIGHT)
    return [key, *(keys.preflight(nonce, part) for part in ("parts", "create", "race"))]


def _try(name: str, call: Callable[[], str], clock: Clock, needs: str) -> Check:
    """Run a check; ``call`` returns the problem, or an empty string."""
    started_s = clock.monotonic()
    try:
        wrong = call()
    except StoreUnavailable as error:
        wrong = str(error) or type(error).__name__
        needs = NO_ANSWER
    except StoreError as error:
        wrong = str(error) or type(error).__name__
    seconds = clock.monotonic() - started_s
    return Check(name, not wrong, wrong, seconds, needs if wrong else "")


_Checks = Iterator[tuple[str, set[str], Callable[[], str]]]


def _checks(store: Store, key: str, *, quick: bool) -> _Checks:
    """Yield the name of each check, the checks that it depends on, and its function."""
    plain, parts, created, race = _keys(key)
    written = {"write"}
    yield "write", set(), lambda: _written(store, plain)
    yield "read", written, lambda: _differs(_BODY, store.get(plain))
    yield "read a range", written, lambda: _differs(_BODY[5:9], store.get_range(plain, 5, 4))
    yield "list", written, lambda: _differs(True, plain in _listed(store))
    if not quick:
        yield "write in parts", written | {"read a range"}, lambda: _in_parts(store, parts)
    yield "create", written, lambda: _differs(True, store.create(created, _BODY))
    yield (
        "refuse to create twice",
        {"create"},
        lambda: _differs(False, store.create(created, b"other")),
    )
    if not quick:
        yield "let one of many create", {"create", "read"}, lambda: _race(store, race)
    yield "delete", written, lambda: _deleted(store, key)


def _differs(expected: object, actual: object) -> str:
    return "" if actual == expected else f"expected {expected!r}, found {actual!r}"


def _written(store: Store, key: str) -> str:
    store.put(key, _BODY)
    return ""


def _listed(store: Store) -> set[str]:
    return {info.key for info in store.list(keys.PREFLIGHT)}


def _in_parts(store: Store, key: str) -> str:
    store.put_stream(key, lambda: [bytes(PART_BYTES), _TAIL])
    return _differs(b"\0" + _TAIL, store.get_range(key, PART_BYTES - 1, 1 + len(_TAIL) + 1))


def _race(store: Store, key: str) -> str:
    bodies = [f"racer {racer}".encode() for racer in range(RACERS)]
    with ThreadPoolExecutor(RACERS) as pool:
        won = [*pool.map(partial(store.create, key), bodies)]
    if sum(won) != 1:
        return f"expected 1 winner of {RACERS} racing creates, found {sum(won)}"
    return _differs(bodies[won.index(True)], store.get(key))


def _deleted(store: Store, key: str) -> str:
    store.delete(_keys(key))
    left = sorted(info.key for info in store.list(keys.PREFLIGHT) if info.key.startswith(key))
    return _differs([], left)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m diloco.preflight",
        description="Check that a bucket supports every request of a run.",
    )
    add_common_options(parser)
    parser.add_argument("uri", metavar="URI", help="the rendezvous: s3://..., gs://..., a folder")
    parser.add_argument("--quick", action="store_true", help="skip the large object and the race")
    given: Any = parser.parse_args(arguments)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        report = preflight(given.uri, quick=given.quick)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(report.uri)
    for check in report.checks:
        detail = " ".join(check.detail.split())
        print(f"  {check.name:<24}{'ok' if check.ok else 'NO':<4}{check.seconds:7.2f} s  {detail}")
        if check.needs:
            print(f"{'':<30}needs {check.needs}")
    return 0 if report.ok else 1


def _end(*_: object) -> None:
    raise SystemExit(143)  # unwinds, so that the objects are deleted


if __name__ == "__main__":
    sys.exit(main())
