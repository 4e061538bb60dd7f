"""Executors of pools, with credential and options, and the catalogue of hardware prices.

Executors are cached per process: their clients do not survive a fork, and creating one opens
connections. A changed credential gets a new executor.
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
    AccountError,
    Capabilities,
    ExecutorConfig,
    ExecutorError,
)
from executors.catalogue import Catalogue
from executors.executor import Executor
from executors.registry import BACKENDS, TABLES, executor_class, get_executor
from runs.backends import price_settings
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


def executor_for(pool: ReplicaPool) -> Executor:
    """The executor of a pool; see :func:`executor_of`."""
    return executor_of(pool.backend, pool.credential)


def executor_of(backend: str, credential: Credential | None) -> Executor:
    """The executor of a backend with a credential; None for the server's own environment.

    Raises :class:`~executors.base.AccountError` if the credential cannot be decrypted, its options
    are invalid, or the client of the backend is not installed.
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
        raise AccountError(f"{backend} cannot be used as it is set up: {error}") from error


def backends_in_use() -> list[str]:
    """Backends of runs that have not ended; [] if the database cannot be read."""
    try:
        pools = ReplicaPool.objects.filter(run__ended_at=None)
        return sorted(set(pools.values_list("backend", flat=True)))
    except DatabaseError:
        return []
    finally:
        connections.close_all()


def usable_backends() -> dict[str, str]:
    """Backend -> label of the backends whose client is installed."""
    usable = {}
    for backend, label in BACKENDS.items():
        with contextlib.suppress(ImportError):
            executor_class(backend)
            usable[backend] = label
    return usable


def capabilities_of(backend: str, credential: Credential | None = None) -> Capabilities:
    """Capabilities of a backend with a credential, without calling the backend.

    Returns the defaults if no executor can be created; a launch reports the error.
    """
    try:
        return executor_of(backend, credential).capabilities
    except ExecutorError:
        return Capabilities()


def catalogue() -> Catalogue:
    """Hardware of all backends, with the prices that administrators set in the application, then
    those of the deployment's file, then list prices."""
    return price_settings.applied(deployed())


def deployed() -> Catalogue:
    """Hardware of all backends; prices in ``ARCHIPELAGO_HARDWARE`` override list prices.

    The file is read again after it changed, because prices are needed before every launch. If it
    became invalid while the server runs, the error is logged and its previous content applies.
    """
    path = settings.HARDWARE_FILE
    if path is None:
        return _catalogue(None, 0)
    try:
        changed_ns = path.stat().st_mtime_ns
    except OSError:
        changed_ns = 0  # reading the missing file raises the error
    try:
        current = _last_good[path] = _catalogue(path, changed_ns)
    except ValueError as error:
        if path not in _last_good:
            raise
        if _refused.get(path) != changed_ns:
            _refused[path] = changed_ns
            logger.error("%s; the previous prices apply", error)
        return _last_good[path]
    return current


def listed() -> Catalogue:
    """Hardware with list prices, without the file of the deployment."""
    return _catalogue(None, 0)


_last_good: dict[Path, Catalogue] = {}
_refused: dict[Path, int] = {}
"""Modification time of the last invalid file, so that its error is logged once."""


def _key(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)


@lru_cache(maxsize=64)
def _executor(
    pid: int, backend: str, secrets: str, options: str, deployment: str, state_dir: Path
) -> Executor:
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
