"""Records of a run: replicas, rounds, events, chart series, logs, checkpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.http import HttpRequest
from ninja import Query, Router

from archipelago import rows as shared
from dashboard.access import attempt_or_404, replica_or_404
from dashboard.api import rows
from dashboard.api.auth import run_to_see
from dashboard.api.types import LARGE, NO_NUL, SMALL, After, Number, OfReplica, RunId, responses
from runs.queries import fleet, paging, selectors
from runs.queries.replicas import attempt_log

router = Router(tags=["records"])
MAX_POINTS = 20_000


@router.get(
    "/runs/{uuid:run_id}/replicas", response=responses(list[shared.Replica], but=(409, 413))
)
def list_replicas(request: HttpRequest, run_id: RunId) -> Any:
    """All replicas, by number."""
    return fleet.replica_rows(run_to_see(request, run_id))


@router.get(
    "/runs/{uuid:run_id}/replicas/{int:number}",
    response=responses(rows.ReplicaDetail, but=(409, 413)),
)
def get_replica(request: HttpRequest, run_id: RunId, number: Number) -> Any:
    """One replica and its attempts, newest first."""
    replica = replica_or_404(run_to_see(request, run_id), number)
    return fleet.replica_row(replica) | {"attempts": fleet.attempt_rows(replica)}


@router.get(
    "/runs/{uuid:run_id}/replicas/{int:number}/attempts/{int:attempt}/log",
    response=responses(rows.BackendLog, but=(409, 413)),
)
def get_attempt_log(
    request: HttpRequest,
    run_id: RunId,
    number: Number,
    attempt: Number,
    after: Annotated[str, Query(max_length=500, pattern=NO_NUL)] = "",
) -> Any:
    """The backend's log of one attempt, from the position ``after`` on."""
    run = run_to_see(request, run_id)
    return attempt_log(attempt_or_404(run, number, attempt), after=after)


@router.get("/runs/{uuid:run_id}/rounds", response=responses(list[shared.Round], but=(409, 413)))
def list_rounds(
    request: HttpRequest,
    run_id: RunId,
    after: Annotated[int, Query(ge=0, le=SMALL, description="Rounds above this number")] = 0,
    limit: Annotated[int, Query(ge=1, le=selectors.ROUNDS_LIMIT)] = 100,
) -> Any:
    """Rounds above ``after`` with their contributions, oldest first. A response has at most 6,000
    contributions, or one round: with many replicas there are fewer than ``limit`` rounds."""
    run = run_to_see(request, run_id)
    most = max(selectors.RESPONSE_CONTRIBUTIONS // max(run.replicas.count(), 1), 1)
    numbers = (
        run.rounds.filter(number__gt=after).order_by("number").values_list("number", flat=True)
    )
    return selectors.round_rows(run, numbers=numbers[: min(limit, most)])


@router.get("/runs/{uuid:run_id}/events", response=responses(list[shared.Event], but=(409, 413)))
def list_events(
    request: HttpRequest,
    run_id: RunId,
    after: After = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> Any:
    """Events, oldest first: time, actor, old and new state, message."""
    return paging.events_after(run_to_see(request, run_id), after, limit=limit)


@router.get("/runs/{uuid:run_id}/logs", response=responses(list[shared.LogLine], but=(409, 413)))
def list_logs(
    request: HttpRequest,
    run_id: RunId,
    replica: OfReplica = None,
    level: Literal["", "debug", "info", "warning", "error"] = "",
    text: Annotated[str, Query(max_length=200, pattern=NO_NUL, description="Substring")] = "",
    after: Annotated[int | None, Query(ge=0, le=LARGE)] = None,
    limit: Annotated[int, Query(ge=1, le=2000)] = 500,
) -> Any:
    """Log lines of the replicas, oldest first: those with an id above ``after``, or the newest."""
    return paging.log_lines(
        run_to_see(request, run_id),
        replica=replica,
        level=level,
        text=text,
        after_id=after,
        limit=limit,
    )


@router.get("/runs/{uuid:run_id}/series", response=responses(list[rows.Series], but=(409, 413)))
def list_series(request: HttpRequest, run_id: RunId) -> Any:
    """Names of the chart series; ``replica`` is null for series of the whole run."""
    names = selectors.series_of(run_to_see(request, run_id))
    return [{"series": series, "replica": replica} for series, replica in names]


@router.get("/runs/{uuid:run_id}/points", response=responses(rows.Points, but=(409, 413)))
def get_points(
    request: HttpRequest,
    run_id: RunId,
    series: Annotated[str, Query(min_length=1, max_length=100, pattern=NO_NUL)],
    replica: OfReplica = None,
    after_step: Annotated[int, Query(ge=-1, le=LARGE)] = -1,
    max_points: Annotated[int, Query(ge=1, le=MAX_POINTS)] = 2000,
) -> Any:
    """One chart series, downsampled so that extremes remain; ``export`` has every point."""
    run = run_to_see(request, run_id)
    return selectors.points(
        run, series, replica=replica, after_step=after_step, max_points=max_points
    )


@router.get(
    "/runs/{uuid:run_id}/checkpoints", response=responses(list[rows.Checkpoint], but=(409, 413))
)
def list_checkpoints(request: HttpRequest, run_id: RunId) -> Any:
    """Checkpoints in the rendezvous, oldest first; ``key`` is relative to the run's prefix."""
    return paging.checkpoint_rows(run_to_see(request, run_id))
