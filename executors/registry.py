"""The backends: those of this package and those of installed packages.

A backend of this package is one folder and one line of :data:`BUILT_IN`. A package of its own
registers one by an entry point of the group ``archipelago.backends``::

    [project.entry-points."archipelago.backends"]
    slurm = "archipelago_slurm.backend:BACKEND"

An entry point that cannot be loaded, or that takes a name in use, is logged and left out.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from importlib import metadata
from typing import Any, cast

from executors.backend import Backend
from executors.base import ExecutorConfig
from executors.executor import Executor

logger = logging.getLogger(__name__)

BUILT_IN = (
    "executors.local.backend",
    "executors.modal.backend",
    "executors.huggingface.backend",
    "executors.sagemaker.backend",
    "executors.kubernetes.backend",
)
GROUP = "archipelago.backends"


def _installed() -> Iterator[Backend]:
    for entry_point in metadata.entry_points(group=GROUP):
        try:
            found = entry_point.load()
        except Exception:
            logger.exception("cannot load the backend %s (%s)", entry_point.name, entry_point.value)
            continue
        if isinstance(found, Backend) and found.name == entry_point.name:
            yield found
        else:
            logger.error(
                "entry point %s of %s: expected a Backend of that name, found %r",
                entry_point.name,
                GROUP,
                found,
            )


def _load() -> dict[str, Backend]:
    backends: dict[str, Backend] = {}
    for path in BUILT_IN:
        backend: Backend = importlib.import_module(path).BACKEND
        backends[backend.name] = backend
    for backend in _installed():
        if backend.name in backends:
            logger.error("backend %s is registered twice; the second is ignored", backend.name)
        backends.setdefault(backend.name, backend)
    return backends


DESCRIPTIONS = _load()
"""Backend name -> description."""

BACKENDS = {name: backend.label for name, backend in DESCRIPTIONS.items()}
"""Backend name -> label in forms and on pages."""

TABLES = tuple(backend.hardware for backend in DESCRIPTIONS.values())
"""Hardware and prices of every backend."""

ON_SERVER = frozenset(name for name, backend in DESCRIPTIONS.items() if backend.on_server)
"""Backends whose jobs are processes of the server's own machine."""


def pool_options(backend: str) -> frozenset[str]:
    """Options that any pool can set; every other option needs a pattern of the credential.
    Empty for an unknown backend."""
    found = DESCRIPTIONS.get(backend)
    return found.pool_options if found else frozenset()


def get_executor(backend: str, config: ExecutorConfig) -> Executor:
    """The executor of ``backend``. Raises :class:`ValueError` for an unknown name."""
    return cast(Executor, executor_class(backend)(config))


def executor_class(backend: str) -> Any:
    """The class of an executor, which is called with an :class:`~executors.base.ExecutorConfig`.

    Raises:
        ValueError: an unknown name.
        ImportError: the backend's SDK is not installed.
    """
    if backend not in DESCRIPTIONS:
        raise ValueError(f"expected a backend of {', '.join(BACKENDS)}, found {backend!r}")
    module, _, name = DESCRIPTIONS[backend].executor.partition(":")
    return getattr(importlib.import_module(module), name)
