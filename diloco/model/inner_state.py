"""The caller's inner optimizers, and other objects to save with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

OPTIMIZER = "inner_optimizer"
"""Name of the state of the only inner optimizer; those of several have their index appended."""
BY_NAME = "inner_optimizer_by_name"
"""Name of the state of all inner optimizers by parameter name, which a replica of several ranks
saves."""

InnerOptimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""One inner optimizer, or several for different parameters, such as Muon and AdamW."""


class Stateful(Protocol):
    """An object with ``state_dict`` and ``load_state_dict``, such as a data loader or a
    scheduler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> object: ...


def optimizers_of(given: InnerOptimizers) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers as a tuple. Raises :class:`ValueError` if there is none, or if two have
    a parameter in common, which both would change."""
    optimizers = tuple(given) if isinstance(given, Sequence) else (given,)
    if not optimizers:
        raise ValueError("inner_optimizer: expected an optimizer or several, found none")
    owner: dict[int, int] = {}
    for index, optimizer in enumerate(optimizers):
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                if owner.setdefault(id(parameter), index) != index:
                    raise ValueError(
                        "inner_optimizer: expected each parameter in one optimizer, found one of "
                        f"shape {list(parameter.shape)} in the optimizers "
                        f"{owner[id(parameter)]} and {index}"
                    )
    return optimizers


class Inner:
    """The inner optimizers and the caller's ``stateful`` objects by name, saved as state trees."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        stateful: Mapping[str, Stateful] | None = None,
    ) -> None:
        self.optimizers = tuple(optimizers)
        self._stateful = dict(stateful or {})
        reserved = sorted(name for name in self._stateful if name.startswith(OPTIMIZER))
        if reserved:
            raise ValueError(
                f"stateful: expected names that do not start with {OPTIMIZER!r}, found {reserved}"
            )

    def _by_name(self) -> dict[str, torch.optim.Optimizer]:
        if len(self.optimizers) == 1:
            return {OPTIMIZER: self.optimizers[0]}
        return {f"{OPTIMIZER}.{n}": optimizer for n, optimizer in enumerate(self.optimizers)}

    def save(self) -> dict[str, Any]:
        """Return state dicts by name."""
        return {
            **{name: optimizer.state_dict() for name, optimizer in self._by_name().items()},
            **self._save_stateful(),
        }

    def _save_stateful(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._stateful.items()}

    def load(self, trees: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`save`; an object without a saved state keeps its current
        one. Raises :class:`ValueError` for optimizers of several ranks, and for another number of
        them; the caller's objects are restored nevertheless."""
        own, saved = self._by_name(), {name for name in trees if name.startswith(OPTIMIZER)}
        fits = not saved or saved == own.keys()
        for name in saved if fits else ():
            own[name].load_state_dict(trees[name])
        self._load_stateful(trees)
        if BY_NAME in saved:
            raise ValueError(
                "expected the inner optimizer of one process, found that of several ranks"
            )
        if not fits:
            raise ValueError(
                f"expected the state of {len(own)} inner optimizers, found that of {len(saved)}"
            )

    def _load_stateful(self, trees: Mapping[str, Any]) -> None:
        for name, part in self._stateful.items():
            if name in trees:
                part.load_state_dict(trees[name])

    def reset(self) -> None:
        """Clear the moments of the inner optimizers."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
