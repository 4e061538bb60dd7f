"""Workloads: model, data and loss of a run.

Each kind of :data:`~diloco.protocol.workload.WORKLOADS` has a module of its name here with a
function ``load_training(document, settings, *, replica, device)``, which returns a
:class:`Workload`. It is imported only for a run of that kind.
"""

from __future__ import annotations

import importlib

import torch

from diloco.errors import install_extra
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.settings import SettingsError
from diloco.protocol.workload import WORKLOADS
from diloco.workloads.base import HeldOutLoss, Workload

__all__ = ["HeldOutLoss", "Workload", "load_workload"]


def load_workload(document: GroupDocument, *, replica: int, device: torch.device | str) -> Workload:
    """Load the workload of ``document`` for one replica, including its data.

    Raises :class:`SettingsError` if the workload document or the data is invalid, and
    :class:`ValueError` for a replica number without a data shard.
    """
    settings = document.settings
    if not 0 <= replica < settings.max_replicas:
        raise ValueError(
            f"expected a replica number from 0 to {settings.max_replicas - 1}, one for each data "
            f"shard, found {replica}"
        )
    kind = document.workload.get("kind")
    described = WORKLOADS.get(kind) if isinstance(kind, str) else None
    if described is None:
        expected = " or ".join(map(repr, WORKLOADS))
        raise SettingsError("workload", f"expected kind {expected}, found {kind!r}")
    workload = described.from_dict(document.workload)
    try:
        module = importlib.import_module(f"{__name__}.{kind}")
    except ModuleNotFoundError as error:
        if not described.extra:
            raise
        raise SettingsError(
            "workload",
            f"expected {error.name} for kind {kind!r}, found none; "
            f"{install_extra(described.extra)}",
        ) from None
    training: Workload = module.load_training(
        workload, settings, replica=replica, device=torch.device(device)
    )
    return training
