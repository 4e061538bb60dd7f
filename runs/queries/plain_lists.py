"""Bounded lists for the run page without JavaScript. Each makes one query."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from runs.models import Replica, ReplicaPool, Round, Run
from runs.queries.fleet import breaker_row, pool_name

MOST = 50
"""Rounds, replicas or pools in one list."""
_STRIPS = ("outcomes", "timings", "lateness", "cosines")


@dataclass(frozen=True, kw_only=True)
class RoundLine:
    """``took_s``: seconds since the commit of the round before, if that round is known."""

    round: Round
    took_s: float | None


def newest_rounds(run: Run, *, below: int | None = None) -> list[RoundLine]:
    """The newest rounds (below the number ``below``), newest first."""
    rounds = Round.objects.filter(run=run).defer(*_STRIPS).order_by("-number")
    if below is not None:
        rounds = rounds.filter(number__lt=below)
    found = list(rounds[: MOST + 1])
    earlier = [*found[1:], None]  # one longer if there are no rounds
    lines = [
        RoundLine(round=one, took_s=_took_s(one, before))
        for one, before in zip(found, earlier, strict=False)
    ]
    return lines[:MOST]


def _took_s(one: Round, before: Round | None) -> float | None:
    if before is None or before.number != one.number - 1:
        return None
    if one.committed_at is None or before.committed_at is None:
        return None
    return (one.committed_at - before.committed_at).total_seconds()


def replicas_from(run: Run, *, above: int = -1) -> list[Replica]:
    """The first replicas with a number above ``above``, with their pools."""
    replicas = Replica.objects.filter(run=run, number__gt=above).select_related("pool")
    return list(replicas.order_by("number")[:MOST])


def pool_lines(
    pools: Iterable[ReplicaPool], replicas: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Pools with their number of replicas. No query if the credentials are loaded.

    Args:
        replicas: ``pool_id`` of every replica of the run.
    """
    counts = Counter(one["pool_id"] for one in replicas)
    return [
        {
            "pool": pool,
            "name": pool_name(pool),
            "replicas": counts[pool.pk],
            "breaker": breaker_row(pool),
        }
        for pool in list(pools)[:MOST]
    ]
