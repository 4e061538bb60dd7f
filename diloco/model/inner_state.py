"""What belongs to the caller: the inner optimizer, and whatever else it wants saved with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch


class Stateful(Protocol):
    """A data loader, a scheduler, a scaler: anything with the usual pair of methods."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> object: ...


class Inner:
    """The inner optimizer and the caller's own ``stateful``, by name, as state trees."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, stateful: Mapping[str, Stateful] | None = None
    ) -> None:
        self.optimizer = optimizer
        self._stateful = dict(stateful or {})
        if "inner_optimizer" in self._stateful:
            raise ValueError("expected names other than 'inner_optimizer' in stateful")

    def save(self) -> dict[str, Any]:
        """State dicts by name."""
        return {
            "inner_optimizer": self.optimizer.state_dict(),
            **{name: part.state_dict() for name, part in self._stateful.items()},
        }

    def load(self, trees: Mapping[str, Any]) -> None:
        """Restore what :meth:`save` gave; a name that was not saved keeps its fresh state."""
        if "inner_optimizer" in trees:
            self.optimizer.load_state_dict(trees["inner_optimizer"])
        for name, part in self._stateful.items():
            if name in trees:
                part.load_state_dict(trees[name])

    def reset(self) -> None:
        """Forget the inner optimizer's moments."""
        self.optimizer.state.clear()
