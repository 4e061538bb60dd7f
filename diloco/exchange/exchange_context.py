"""The state and the collaborators that all rounds of one process share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from diloco.clock import Clock
from diloco.exchange.reduce import Own, Reduction
from diloco.exchange.round_observer import RoundObserver
from diloco.exchange.team import Team
from diloco.exchange.timings import Timings
from diloco.exchange.waiting import ExpectedWait
from diloco.membership.lease import Lease
from diloco.protocol.records import Identity, Plan
from diloco.protocol.settings import GroupSettings
from diloco.store.base import Store

MEMORY = 0.7
"""Weight of the past in the running mean of the duration of exchanges."""


@dataclass
class ExchangeHistory:
    """What a process remembers of earlier rounds: ``usual_s``, the running mean of the duration of
    exchanges (0 before the first one), the waits for a plan and for a commit in them, and
    ``candidates``, the contributors of the last plan."""

    usual_s: float = 0.0
    plan: ExpectedWait = field(default_factory=ExpectedWait)
    commit: ExpectedWait = field(default_factory=ExpectedWait)
    candidates: tuple[Identity, ...] = ()

    def add(self, seconds: float) -> None:
        """Add the duration of one exchange."""
        past = self.usual_s or seconds
        self.usual_s = MEMORY * past + (1 - MEMORY) * seconds


@dataclass(frozen=True, kw_only=True)
class ExchangeContext:
    """State and collaborators shared by all rounds of one process.

    ``check`` is called while waiting, and raises to end the exchange (stop, fence). The lease shows
    what the process waits for. The ``team`` uploads and reduces.
    """

    store: Store
    settings: GroupSettings
    clock: Clock
    lease: Lease
    round_observer: RoundObserver
    check: Callable[[], None]
    team: Team
    history: ExchangeHistory = field(default_factory=ExchangeHistory)

    def reduction(self, plan: Plan, timings: Timings, own: Own | None = None) -> Reduction:
        """Return the reduction of a plan; see :class:`Reduction`."""
        return self.team.reduction(
            plan,
            self.round_observer.slots(plan.round),
            timings=timings,
            commit_of=self.round_observer.commit_of,
            own=own,
        )
