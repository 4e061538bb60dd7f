"""Two older entry points, thin wrappers of :class:`diloco.manager.Manager` and torchft's DiLoCo.

New code uses a :class:`~diloco.manager.Manager`, or :func:`diloco.join`.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from diloco.allreduce import ObjectStoreAllReduce
from diloco.errors import install_extra
from diloco.torchft.manager import Manager


class MockManager(Manager):
    """A Manager over the ranks of an :class:`~diloco.allreduce.ObjectStoreAllReduce`.

    Each rank is a replica of one process, and every step needs all of them. ``keywords`` are those
    of the Manager.
    """

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
    """Create torchft's ``DiLoCo`` with the whole model as one fragment: a context manager in which
    an outer step follows every ``sync_every``-th step of ``inner_optimizer``.

    ``options`` are keywords of ``torchft.local_sgd.DiLoCo``.
    """
    try:
        from torchft.local_sgd import DiLoCo
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"make_diloco_outer_loop: expected torchft, found none; {install_extra('torchft')}",
            name=error.name,
        ) from None
    return DiLoCo(manager, [model], inner_optimizer, outer_optimizer, sync_every, **options)
