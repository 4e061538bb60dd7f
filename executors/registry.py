"""Executors by backend name, made with what the control plane knows."""

from __future__ import annotations

from pathlib import Path

from executors.base import ServerlessExecutor

BACKENDS = {"local": "Local processes on this machine"}
"""Backend name -> what a form calls it."""


def get_executor(backend: str, *, state_dir: Path) -> ServerlessExecutor:
    """The executor of ``backend``; ``state_dir`` is where local jobs keep their files.

    Raises :class:`ValueError` for an unknown name.
    """
    if backend == "local":
        from executors.local import LocalProcessExecutor

        return LocalProcessExecutor(state_dir / "jobs")
    raise ValueError(f"expected a backend of {', '.join(BACKENDS)}, found {backend!r}")
