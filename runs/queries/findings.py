"""Findings: what needs attention in a run, in one line each, the worst first.

:func:`find` is a pure function of the rows that pages show. Alerts (:mod:`runs.alerts.rules`) are
stored, notify users and close; findings are computed when they are read, so that they also cover
conditions without a notification, such as a slow replica. Open alerts are findings, except for
those of :data:`COVERED` kinds, which are computed here from newer data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from django.utils import timezone

from archipelago.run_page_rows import Finding
from runs.alerts import store
from runs.backends.health import STALE_RUN_S
from runs.models import Run
from runs.queries import fleet, round_summaries
from runs.states import RUN_ENDED, RUN_LIVE, ReplicaState, RunState

COVERED = frozenset({"below_quorum", "budget", "pool", "replica_lost", "finished"})
"""Kinds of alerts that findings replace."""
BUDGET_SHOWN = 0.8
STRAGGLER_ROUNDS = 20
"""Number of the newest rounds in which stragglers are counted."""
STRAGGLER_LEAST = 8
"""Fewer rounds show no straggler."""
STRAGGLER_SHARE = 0.5
"""A straggler was last in more than this share of the rounds."""
STRAGGLER_LAG = 0.05
"""A straggler delays a round by more than this share of its duration."""
OVERDUE = 2
"""A checkpoint is overdue after this many times the rounds between two of them."""
TROUBLED = (ReplicaState.FAILED, ReplicaState.LOST, ReplicaState.SUSPECT)
NUMBERS = 6
"""Replicas that are named in one finding."""
LEVELS = ("error", "warning", "info")


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The run, as far as findings need it."""

    state: str
    live: int
    quorum: int
    target: int
    cost_usd: float | None
    budget_usd: float | None
    committed: int
    silent_s: float | None = None
    """Seconds since the newest telemetry; None before the first."""
    checkpoint_every: int = 0
    checkpoint_round: int | None = None
    round_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class PoolFacts:
    id: int
    name: str
    state: str
    """State of the circuit breaker (:func:`runs.queries.fleet.breaker_row`)."""
    last_error: str = ""
    replicas: int = 0


@dataclass(frozen=True, kw_only=True)
class ReplicaFacts:
    number: int
    state: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class RoundFacts:
    """A committed round: its slowest replica, and by how many seconds it delayed the others."""

    straggler: int | None
    lag_s: float | None


@dataclass(frozen=True, kw_only=True)
class AlertFacts:
    kind: str
    level: str
    title: str
    message: str
    replica: int | None = None


def find(
    run: RunFacts,
    *,
    pools: Iterable[PoolFacts] = (),
    replicas: Sequence[ReplicaFacts] = (),
    rounds: Sequence[RoundFacts] = (),
    alerts: Iterable[AlertFacts] = (),
) -> list[Finding]:
    """All findings, errors first."""
    found = [_of_alert(alert) for alert in alerts if alert.kind not in COVERED]
    found += _failed(replicas)
    found += _budget(run)
    if run.state not in RUN_ENDED:
        found += [one for pool in pools for one in _pool(pool)]
        found += _quorum(run)
        found += _silence(run)
        found += _checkpoint(run)
        found += _straggler(run, rounds)
    return sorted(found, key=lambda one: LEVELS.index(one.level) if one.level in LEVELS else 9)


def _span(seconds: float) -> str:
    """A duration in its largest unit, e.g. ``4 min``."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _finding(kind: str, level: str, message: str, **more: Any) -> Finding:
    defaults: dict[str, Any] = {"detail": "", "replica": None, "pool": None, "tab": "overview"}
    return Finding(kind=kind, level=level, message=message, **(defaults | more))


def _of_alert(alert: AlertFacts) -> Finding:
    return _finding(
        alert.kind,
        alert.level,
        alert.title,
        detail=alert.message,
        replica=alert.replica,
        tab="activity",
    )


def _pool(pool: PoolFacts) -> list[Finding]:
    texts = {
        "action_required": ("error", "blocked, action required"),
        "open": ("warning", "launches paused after failures"),
        "half_open": ("warning", "launching one replica to test"),
        "price_limit": ("warning", "price above the limit"),
        "failing": ("info", "launches fail and are retried"),
    }
    if pool.state not in texts:
        return []
    level, text = texts[pool.state]
    message = f"{pool.name}: {text}"
    more = {"detail": pool.last_error, "pool": pool.id, "tab": "replicas"}
    return [_finding(f"pool_{pool.state}", level, message, **more)]


def _failed(replicas: Sequence[ReplicaFacts]) -> list[Finding]:
    found = []
    for state, level, text in (
        (ReplicaState.FAILED, "error", "failed"),
        (ReplicaState.LOST, "warning", "lost, waiting for a relaunch"),
        (ReplicaState.SUSPECT, "warning", "silent"),
    ):
        of_state = [one for one in replicas if one.state == state]
        if not of_state:
            continue
        first = of_state[0]
        one = len(of_state) == 1
        message = f"{_names([r.number for r in of_state])} {text}"
        more = {"detail": first.reason, "replica": first.number if one else None}
        found.append(_finding(f"replica_{state}", level, message, tab="replicas", **more))
    return found


def _names(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"replica {numbers[0]}"
    named = ", ".join(str(number) for number in numbers[:NUMBERS])
    more = len(numbers) - NUMBERS
    return f"replicas {named}" + (f" and {more} more" if more > 0 else "")


def _budget(run: RunFacts) -> list[Finding]:
    if not run.budget_usd or run.cost_usd is None:
        return []
    share = run.cost_usd / run.budget_usd
    if share < BUDGET_SHOWN:
        return []
    level = "error" if share >= 1 else "warning"
    detail = f"${run.cost_usd:,.2f} of ${run.budget_usd:,.2f}"
    return [_finding("budget", level, f"budget {share:.0%} spent", detail=detail)]


def _quorum(run: RunFacts) -> list[Finding]:
    if run.state not in RUN_LIVE or not run.committed or run.live >= run.quorum:
        return []
    message = f"below quorum: {run.live} of {run.quorum} needed replicas live"
    return [_finding("below_quorum", "error", message, tab="replicas")]


def _silence(run: RunFacts) -> list[Finding]:
    if run.state not in RUN_LIVE or run.silent_s is None or run.silent_s <= STALE_RUN_S:
        return []
    return [_finding("no_data", "warning", f"no data for {_span(run.silent_s)}", tab="replicas")]


def _checkpoint(run: RunFacts) -> list[Finding]:
    every = run.checkpoint_every
    since = run.committed - (run.checkpoint_round or 0)
    if run.state not in RUN_LIVE or every <= 0 or since < OVERDUE * every:
        return []
    newest = "none yet" if run.checkpoint_round is None else f"newest: round {run.checkpoint_round}"
    message = f"checkpoint overdue: {since} rounds without one, expected every {every}"
    more = {"detail": newest, "tab": "checkpoints"}
    return [_finding("checkpoint_overdue", "warning", message, **more)]


def _straggler(run: RunFacts, rounds: Sequence[RoundFacts]) -> list[Finding]:
    counted = [one for one in rounds if one.straggler is not None][-STRAGGLER_ROUNDS:]
    if len(counted) < STRAGGLER_LEAST:
        return []
    [(replica, times)] = Counter(one.straggler for one in counted).most_common(1)
    lags = sorted(one.lag_s or 0.0 for one in counted if one.straggler == replica)
    lag_s = lags[len(lags) // 2]
    if times <= STRAGGLER_SHARE * len(counted):
        return []
    if run.round_s and lag_s < STRAGGLER_LAG * run.round_s:
        return []
    message = f"replica {replica} was last in {times} of {len(counted)} rounds"
    detail = f"the others waited {_span(lag_s)} in a typical round"
    more = {"detail": detail, "replica": replica, "tab": "timeline"}
    return [_finding("straggler", "info", message, **more)]


def of_run(run: Run) -> list[dict[str, Any]]:
    """Findings of a run from :func:`runs.queries.selectors.runs_for`, as rows. The number of
    queries does not depend on the number of replicas or rounds."""
    annotated: Any = run
    seen = run.last_seen_at
    newest = run.checkpoints.order_by("-round").values_list("round", flat=True).first()
    troubled = run.replicas.filter(state__in=TROUBLED).order_by("number")
    facts = RunFacts(
        state=RunState(run.state),
        live=annotated.live_count,
        quorum=run.settings.min_quorum,
        target=annotated.wanted or run.settings.num_replicas,
        cost_usd=run.cost_usd,
        budget_usd=run.budget_usd,
        committed=run.committed_rounds,
        silent_s=(timezone.now() - seen).total_seconds() if seen else None,
        checkpoint_every=run.settings.checkpoint_every,
        checkpoint_round=newest,
        round_s=run.round_s,
    )
    found = find(
        facts,
        pools=[
            PoolFacts(
                id=row["id"],
                name=row["name"],
                state=row["breaker"]["state"],
                last_error=row["breaker"]["last_error"],
                replicas=row["replicas"],
            )
            for row in fleet.pool_rows(run)
        ],
        replicas=[
            ReplicaFacts(number=number, state=state, reason=reason)
            for number, state, reason in troubled.values_list("number", "state", "state_reason")
        ],
        rounds=[
            RoundFacts(straggler=row["straggler"], lag_s=row["lag_s"])
            for row in round_summaries.summaries(run, most=STRAGGLER_ROUNDS + 1)
            if row["committed_at"]
        ],
        alerts=[
            AlertFacts(
                kind=row["kind"],
                level=row["level"],
                title=row["title"],
                message=row["message"],
                replica=row["replica"],
            )
            for row in store.alert_rows(run)
            if row["closed_at"] is None
        ],
    )
    return [asdict(one) for one in found]
