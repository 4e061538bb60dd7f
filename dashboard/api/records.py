"""What a run has left behind so far: replicas, rounds, events, curves, logs, checkpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.http import HttpRequest
from django.shortcuts import get_object_or_404
from ninja import Query, Router

from dashboard.api import rows
from dashboard.api.auth import replica_of, run_to_see
from dashboard.api.types import LARGE, NO_NUL, SMALL, After, Number, OfReplica, RunId, responses
from runs.backends.attempt_log import read_log
from runs.models import ReplicaAttempt
from runs.queries import fleet, paging, selectors

router = Router(tags=["records"])
MAX_POINTS = 20_000


@router.get("/runs/{uuid:run_id}/replicas", response=responses(list[rows.Replica], but=(409, 413)))
def list_replicas(request: HttpRequest, run_id: RunId) -> Any:
    """All replicas, by number."""
    return fleet.replica_rows(run_to_see(request, run_id))


@router.get(
    "/runs/{uuid:run_id}/replicas/{int:number}",
    response=responses(rows.ReplicaDetail, but=(409, 413)),
)
def get_replica(request: HttpRequest, run_id: RunId, number: Number) -> Any:
    """One replica and its attempts, newest first."""
    replica = replica_of(run_to_see(request, run_id), number)
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
    """What the backend has of an attempt's output, from the position ``after`` on."""
    run = run_to_see(request, run_id)
    found = get_object_or_404(
        ReplicaAttempt.objects.select_related(
            "replica__pool__credential", "replica__run__store_credential"
        ),
        replica__run=run,
        replica__number=number,
        number=attempt,
    )
    tail = read_log(found, after=after)
    return {
        "lines": tail.lines,
        "position": tail.position,
        "cut": tail.cut,
        "unknown": tail.unknown,
        "ended": found.ended_at is not None,
    }


@router.get("/runs/{uuid:run_id}/rounds", response=responses(list[rows.Round], but=(409, 413)))
def list_rounds(
    request: HttpRequest,
    run_id: RunId,
    after: Annotated[int, Query(ge=0, le=SMALL, description="Rounds above this number")] = 0,
    limit: Annotated[int, Query(ge=1, le=selectors.ROUNDS_LIMIT)] = 100,
) -> Any:
    """Rounds and their contributions, oldest first, from ``after`` on. With many replicas they are
    fewer than ``limit``: an answer has 6,000 contributions at most, or one round."""
    run = run_to_see(request, run_id)
    fit = max(selectors.SNAPSHOT_CONTRIBUTIONS // max(run.replicas.count(), 1), 1)
    numbers = (
        run.rounds.filter(number__gt=after).order_by("number").values_list("number", flat=True)
    )
    return selectors.round_rows(run, numbers=numbers[: min(limit, fit)])


@router.get("/runs/{uuid:run_id}/events", response=responses(list[rows.Event], but=(409, 413)))
def list_events(
    request: HttpRequest,
    run_id: RunId,
    after: After = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> Any:
    """What happened, oldest first: who, when, from, to, why."""
    return paging.events_after(run_to_see(request, run_id), after, limit=limit)


@router.get("/runs/{uuid:run_id}/logs", response=responses(list[rows.LogLine], but=(409, 413)))
def list_logs(
    request: HttpRequest,
    run_id: RunId,
    replica: OfReplica = None,
    level: Literal["", "debug", "info", "warning", "error"] = "",
    text: Annotated[str, Query(max_length=200, pattern=NO_NUL, description="Any part")] = "",
    after: Annotated[int | None, Query(ge=0, le=LARGE)] = None,
    limit: Annotated[int, Query(ge=1, le=2000)] = 500,
) -> Any:
    """Lines of the replicas, oldest first: those after the id ``after``, or the newest."""
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
    """Names of the curves there are; ``replica`` is null for those of the whole run."""
    found = selectors.series_of(run_to_see(request, run_id))
    return [{"series": series, "replica": replica} for series, replica in found]


@router.get("/runs/{uuid:run_id}/points", response=responses(rows.Points, but=(409, 413)))
def get_points(
    request: HttpRequest,
    run_id: RunId,
    series: Annotated[str, Query(min_length=1, max_length=32, pattern=NO_NUL)],
    replica: OfReplica = None,
    after_step: Annotated[int, Query(ge=-1, le=LARGE)] = -1,
    max_points: Annotated[int, Query(ge=1, le=MAX_POINTS)] = 2000,
) -> Any:
    """One curve, thinned so that its extremes stay; ``export`` has every point."""
    run = run_to_see(request, run_id)
    return selectors.points(
        run, series, replica=replica, after_step=after_step, max_points=max_points
    )


@router.get(
    "/runs/{uuid:run_id}/checkpoints", response=responses(list[rows.Checkpoint], but=(409, 413))
)
def list_checkpoints(request: HttpRequest, run_id: RunId) -> Any:
    """Weights in the rendezvous, oldest first; ``key`` is below the run's prefix."""
    return paging.checkpoint_rows(run_to_see(request, run_id))
