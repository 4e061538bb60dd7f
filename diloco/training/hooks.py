"""Hooks of the caller around the rounds of a replica.

A hook that raises leaves a round half done, so the exception propagates from ``Group.step``, no
further hook is called, and the group cannot continue in this process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from torch.utils.hooks import RemovableHandle

from diloco.errors import ReplicaError
from diloco.training.progress import OnRound, RoundProgress

BeforeRound = Callable[[int], None]
"""Receives the number of a round whose inner steps are complete."""


class RoundWatcher(Protocol):
    """Follows the contributions of a replica, to record the data that they contain.

    ``before`` is called before a contribution is made, also for an early one of a leaving replica,
    ``after`` with the outcome of the round (included, late or void), and ``discarded`` when the
    local progress is replaced by the global weights. Of several ranks, only the first calls it.
    """

    def before(self, round: int) -> None: ...

    def after(self, round: int, outcome: str) -> None: ...

    def discarded(self) -> None: ...


class NoWatcher:
    """Records nothing."""

    def before(self, round: int) -> None: ...

    def after(self, round: int, outcome: str) -> None: ...

    def discarded(self) -> None: ...


class RoundHooks:
    """Hooks in the order of their registration."""

    def __init__(self) -> None:
        self._before: OrderedDict[int, BeforeRound] = OrderedDict()
        self._after: OrderedDict[int, OnRound] = OrderedDict()
        self._running = False

    def __len__(self) -> int:
        return len(self._before) + len(self._after)

    def register(
        self, *, before: BeforeRound | None = None, after: OnRound | None = None
    ) -> RemovableHandle:
        """Add hooks; the handle's ``remove`` removes them."""
        if before is None and after is None:
            raise ValueError("expected a hook: enter before=, after= or both")
        handle = RemovableHandle(self._before, extra_dict=self._after)
        if before is not None:
            self._before[handle.id] = before
        if after is not None:
            self._after[handle.id] = after
        return handle

    def check(self) -> None:
        """Raise :class:`~diloco.errors.ReplicaError` if a hook has raised an exception."""
        if self._running:
            raise ReplicaError(
                "a round hook has raised an exception, so that its round is half done: handle the "
                "exception inside the hook, or leave the group and restart this replica"
            )

    def before(self, round: int) -> None:
        """Call the hooks of a round whose inner steps are complete."""
        self._running = True
        for hook in list(self._before.values()):
            hook(round)
        self._running = False

    def after(self, progress: RoundProgress) -> None:
        """Call the hooks of a round that has been applied."""
        self._running = True
        for hook in list(self._after.values()):
            hook(progress)
        self._running = False
