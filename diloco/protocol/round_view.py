"""The inputs and actions of :func:`diloco.protocol.round_decision.decide`.

Times are seconds on the observer's own monotonic clock (invariant I5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diloco.protocol.records import Commit, ContributionRecord, Identity, Plan
from diloco.protocol.settings import GroupSettings

GATHER = "gather"
SHARDED = "sharded"
SYNCER = "syncer"
MODES = (GATHER, SHARDED, SYNCER)

WHOLE = 0
"""The only shard of a gathered round: the whole fragment."""

FAR = float("inf")


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Cumulative counts up to the newest commit before the round."""

    committed: int = 0
    tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Result of the observer's own reduction of a shard: a digest, or the failure."""

    digest: str = ""
    failure: str = ""
    failed_replica: int | None = None


@dataclass(frozen=True, kw_only=True)
class RoundView:
    """One observer's view of round ``round``.

    ``contributions`` holds the record of each replica's newest incarnation. ``expected`` are the
    replicas that are believed to be alive and working towards this round or an earlier one,
    ``suspected`` those for which no round waits because their heartbeats are missing, ``live`` all
    that are alive, ``syncers`` the live processes that only reduce. ``numel`` and
    ``tensors`` are the fragment's number of elements and tensors. ``base_round``, ``base_digest``
    and ``model_hash`` describe the observer's own weights. ``totals`` is None while the previous
    commit is unknown. ``previous`` is the newest earlier plan that the observer knows. ``waited_s``
    is how long the observer has waited, ``sync_s`` the recent duration of exchanges.

    After the plan exists: ``merges`` are the observer's own reductions by shard, ``reduced`` the
    digests in a listing of the reduced objects by shard (None: not listed yet).

    ``excluded_replica`` is the replica whose payloads voided the last two rounds, if it was a
    single one. ``committer`` is the coordinator of a store without a conditional write, the only
    replica that can create objects.
    """

    round: int
    fragment: int
    me: Identity
    settings: GroupSettings
    model_hash: str
    numel: int
    tensors: int
    base_round: int
    base_digest: str
    totals: Totals | None
    contributions: Mapping[int, ContributionRecord] = field(default_factory=dict)
    expected: frozenset[int] = frozenset()
    suspected: frozenset[int] = frozenset()
    live: frozenset[int] = frozenset()
    syncers: frozenset[int] = frozenset()
    excluded_replica: int | None = None
    previous: Plan | None = None
    waited_s: float = 0.0
    sync_s: float = 0.0
    plan: Plan | None = None
    merges: Mapping[int, Merge] = field(default_factory=dict)
    reduced: Mapping[int, tuple[str, ...]] | None = None
    committer: int | None = None


@dataclass(frozen=True, kw_only=True)
class DecisionState:
    """Times at which the observer first saw each stage; reset in every round."""

    quorum_s: float | None = None
    grace_s: float = 0.0
    ready_s: float | None = None
    plan_s: float | None = None


@dataclass(frozen=True)
class Wait:
    """No action before ``until_s`` unless new records appear; ``why`` is for display. ``patient``:
    the wait has no limit (a run waits while it is below quorum)."""

    until_s: float
    why: str
    patient: bool = False


@dataclass(frozen=True)
class MakePlan:
    """Create the plan."""

    plan: Plan


@dataclass(frozen=True)
class Reduce:
    """Read and verify slice ``shard`` of every payload of the plan, store the mean unless the round
    is gathered, then decide again with ``merges`` extended."""

    plan: Plan
    shard: int


@dataclass(frozen=True)
class ListShards:
    """List the round's reduced objects and the leases, then decide again."""

    plan: Plan


@dataclass(frozen=True)
class MakeCommit:
    """Create the commit."""

    commit: Commit


Action = Wait | MakePlan | Reduce | ListShards | MakeCommit


def stagger_index(me: Identity, candidates: list[int]) -> int:
    """Return the observer's position among the candidates; all other replicas come after them."""
    return candidates.index(me.replica) if me.replica in candidates else len(candidates)


def names(replicas: list[int]) -> str:
    """Format replica numbers for a message."""
    return ("replica " if len(replicas) == 1 else "replicas ") + ", ".join(map(str, replicas))
