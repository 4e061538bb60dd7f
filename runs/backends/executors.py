"""Executors for pools: which credential, which options, and what their hardware costs.

Executors are kept per process, because their clients do not survive a fork and opening one costs
connections; a changed credential makes a new one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import DatabaseError, connections

from executors.base import (
    Capabilities,
    ExecutorConfig,
    ExecutorError,
    NeedsPerson,
    ServerlessExecutor,
)
from executors.catalogue import Catalogue
from executors.hardware import TABLES
from executors.registry import BACKENDS, executor_class, get_executor
from runs.credentials import open_credential
from runs.credentials.restrictions import options_of_backend
from runs.models import Credential, ReplicaPool

logger = logging.getLogger(__name__)

__all__ = [
    "BACKENDS",
    "capabilities_of",
    "catalogue",
    "executor_for",
    "executor_of",
    "usable_backends",
]


def executor_for(pool: ReplicaPool) -> ServerlessExecutor:
    return executor_of(pool.backend, pool.credential)


def executor_of(backend: str, credential: Credential | None) -> ServerlessExecutor:
    """The executor of a backend with a credential; None is the server's own environment.

    Raises :class:`~executors.base.NeedsPerson` where none can be made: the credential cannot be
    opened, its options are wrong, or the backend's client is not installed.
    """
    secrets = open_credential(credential)
    options = options_of_backend(backend, credential)
    try:
        return _executor(
            os.getpid(),
            backend,
            _key(secrets),
            _key(options),
            settings.DEPLOYMENT,
            settings.VAR_DIR,
        )
    except (ValueError, ImportError) as error:
        raise NeedsPerson(f"{backend} cannot be used as it is set up: {error}") from error


def backends_in_use() -> list[str]:
    """Backends of pools of runs that have not ended; none where the database cannot be read."""
    try:
        pools = ReplicaPool.objects.filter(run__ended_at=None)
        return sorted(set(pools.values_list("backend", flat=True)))
    except DatabaseError:
        return []
    finally:
        connections.close_all()


def usable_backends() -> dict[str, str]:
    """Backend -> its label, of those whose client is installed here."""
    found = {}
    for backend, label in BACKENDS.items():
        with contextlib.suppress(ImportError):
            executor_class(backend)
            found[backend] = label
    return found


def capabilities_of(backend: str, credential: Credential | None = None) -> Capabilities:
    """What a backend can do with that credential and the options; asks nobody. Where they do not
    make an executor, what any backend can do: a launch will say what is wrong with them."""
    try:
        return executor_of(backend, credential).capabilities
    except ExecutorError:
        return Capabilities()


def catalogue() -> Catalogue:
    """Hardware of all backends, with the prices of ``ARCHIPELAGO_HARDWARE`` over the list's.

    The file is read again when it has changed: prices are asked for before every launch. One that
    has become nonsense while the server runs is said in the log, and what it said before holds.
    """
    path = settings.HARDWARE_FILE
    if path is None:
        return _catalogue(None, 0)
    try:
        changed_ns = path.stat().st_mtime_ns
    except OSError:
        changed_ns = 0  # it is missing: reading it says so
    try:
        found = _last_good[path] = _catalogue(path, changed_ns)
    except ValueError as error:
        if path not in _last_good:
            raise
        if _refused.get(path) != changed_ns:
            _refused[path] = changed_ns
            logger.error("%s; the prices read before hold", error)
        return _last_good[path]
    return found


def listed() -> Catalogue:
    """Hardware and prices without the deployment's own file."""
    return _catalogue(None, 0)


_last_good: dict[Path, Catalogue] = {}
_refused: dict[Path, int] = {}
"""When the file that was refused last was written, so that it is said once."""


def _key(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)


@lru_cache(maxsize=64)
def _executor(
    pid: int, backend: str, secrets: str, options: str, deployment: str, state_dir: Path
) -> ServerlessExecutor:
    config = ExecutorConfig(
        deployment=deployment,
        credentials=json.loads(secrets),
        options=json.loads(options),
        state_dir=state_dir,
    )
    return get_executor(backend, config)


@lru_cache(maxsize=4)
def _catalogue(overrides: Path | None, changed_ns: int) -> Catalogue:
    return Catalogue(TABLES, overrides)
