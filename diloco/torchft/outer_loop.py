"""Two older names, thin over :class:`diloco.manager.Manager` and torchft's DiLoCo.

New code makes a :class:`~diloco.manager.Manager` itself, or needs neither: :func:`diloco.join`.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from diloco.allreduce import ObjectStoreAllReduce
from diloco.torchft.manager import Manager


class MockManager(Manager):
    """A Manager for the fixed world of an :class:`~diloco.allreduce.ObjectStoreAllReduce`: all its
    ranks, each a replica of one process, are in every step. ``keywords`` are the Manager's."""

    def __init__(self, store: ObjectStoreAllReduce, **keywords: Any) -> None:
        given: dict[str, Any] = {
            "rendezvous": store.store,
            "replica_id": f"{store.rank:05d}",
            "rank": 0,
            "world_size": 1,
            "min_replica_size": store.world_size,
            "use_async_quorum": False,
        }
        super().__init__(**given | keywords)


def make_diloco_outer_loop(
    model: nn.Module,
    inner_optimizer: Optimizer,
    outer_optimizer: Optimizer,
    sync_every: int,
    *,
    manager: Manager,
    **options: Any,
) -> Any:
    """torchft's ``DiLoCo`` of the whole model as one fragment: a context in which every
    ``sync_every``-th step of ``inner_optimizer`` is followed by an outer one. ``options`` are its
    keywords."""
    try:
        from torchft.local_sgd import DiLoCo
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "make_diloco_outer_loop: expected torchft, found none; "
            "pip install 'archipelago-diloco[torchft]'",
            name=error.name,
        ) from None
    return DiLoCo(manager, [model], inner_optimizer, outer_optimizer, sync_every, **options)
