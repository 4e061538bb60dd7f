"""What one observer knows of a round, and what it can be told to do: the vocabulary of
:func:`diloco.protocol.round_decision.decide`.

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
"""The one shard of a gathered round: all of it."""

FAR = float("inf")


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Cumulative counts up to the newest commit before the round."""

    committed: int = 0
    tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Merge:
    """How the observer's own reduction of a shard went: a digest, or why it failed."""

    digest: str = ""
    failure: str = ""
    failed_replica: int | None = None


@dataclass(frozen=True, kw_only=True)
class RoundView:
    """What one observer has seen of round ``round``.

    ``contributions`` holds the highest incarnation's record of each replica. ``expected`` are the
    replicas believed alive and working towards this round, ``live`` all that are alive,
    ``syncers`` those beside them that only reduce. ``numel`` and ``tensors`` are the fragment's.
    ``base_round``, ``base_digest`` and ``model_hash`` are what the observer itself stands on.
    ``totals`` is None while the commit before is not known. ``waited_s`` is how long the observer
    has been waiting, ``sync_s`` how long exchanges took lately.

    Once there is a plan: ``merges`` are the observer's own reductions by shard, ``reduced`` what a
    listing of the reduced objects showed (shard -> digests; None: not listed).

    ``shunned`` is the replica whose payloads voided the last two rounds, if it was one.
    ``committer``, where the store has no atomic create, is the one replica that may create.
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
    live: frozenset[int] = frozenset()
    syncers: frozenset[int] = frozenset()
    shunned: int | None = None
    waited_s: float = 0.0
    sync_s: float = 0.0
    plan: Plan | None = None
    merges: Mapping[int, Merge] = field(default_factory=dict)
    reduced: Mapping[int, tuple[str, ...]] | None = None
    committer: int | None = None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """When the observer first saw each stage. Starts empty in every round."""

    quorum_s: float | None = None
    grace_s: float = 0.0
    ready_s: float | None = None
    plan_s: float | None = None


@dataclass(frozen=True)
class Wait:
    """Nothing to do before ``until_s`` unless something new is seen; ``why`` is for people.
    ``patient``: it may take for ever, and that is no error (below quorum the run waits)."""

    until_s: float
    why: str
    patient: bool = False


@dataclass(frozen=True)
class MakePlan:
    plan: Plan


@dataclass(frozen=True)
class Reduce:
    """Read and verify slice ``shard`` of every payload of the plan, store the mean if it is not
    gathered, then decide again with ``merges`` completed."""

    plan: Plan
    shard: int


@dataclass(frozen=True)
class Look:
    """List the round's reduced objects and the leases, then decide again."""

    plan: Plan


@dataclass(frozen=True)
class MakeCommit:
    commit: Commit


Action = Wait | MakePlan | Reduce | Look | MakeCommit


def turn(me: Identity, candidates: list[int]) -> int:
    """The observer's place among the candidates; everybody else comes after all of them."""
    return candidates.index(me.replica) if me.replica in candidates else len(candidates)


def names(replicas: list[int]) -> str:
    return ("replica " if len(replicas) == 1 else "replicas ") + ", ".join(map(str, replicas))
