"""Experiment trackers: TensorBoard files, MLflow, trackio and Weights & Biases.

Each module has one class with the methods of :class:`~diloco.trackers.base.Tracker`;
:func:`open_tracker` chooses it by the kind. The package needs neither torch nor Django, so the
server and ``python -m diloco.track`` share it."""

from __future__ import annotations

from diloco.trackers.opening import open_tracker

__all__ = ["open_tracker"]
