"""The fleet and spending of all runs that the caller can view."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any

from django.http import HttpRequest
from django.utils import timezone
from django.utils.text import slugify
from ninja import Query, Router

from archipelago import fleet_rows as shared
from dashboard.api.auth import reader
from dashboard.api.exports import FILES, Format, table_file
from dashboard.api.problems import Invalid, Problem, at
from dashboard.api.types import NO_NUL, OfOwner, OnBackend, responses
from runs.queries import fleet_trouble, live_jobs, spend, spend_export
from runs.queries.attempt_costs import LONGEST_DAYS, Period
from runs.queries.live_jobs import JobFilter

router = Router(tags=["fleet"])
DEFAULT_DAYS = 7


@router.get("/fleet", response=responses(shared.FleetPage, but=(404, 409, 413)))
def get_fleet(
    request: HttpRequest,
    backend: OnBackend = "",
    owner: OfOwner = "",
    state: Annotated[str, Query(max_length=16, pattern=NO_NUL)] = "",
    before: Annotated[
        str | None, Query(pattern=live_jobs.PLACE, description="`next` of the previous page")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = live_jobs.PAGE,
) -> Any:
    """A page of live jobs, their sums, pools with capacity or quota trouble, and orphaned jobs.
    ``state`` is that of the replica."""
    user = reader(request)
    chosen = JobFilter(backend=backend, owner=owner, state=state)
    jobs = live_jobs.live_jobs(user)
    counted = live_jobs.counts(jobs)
    rows, after = live_jobs.page(jobs, chosen, before=before or "", limit=limit)
    pools, more_pools = fleet_trouble.troubled_pools(user, chosen, now=timezone.now())
    orphans, more_orphans = fleet_trouble.orphan_rows(user, chosen)
    return {
        "jobs": rows,
        "next": after or None,
        "total": live_jobs.matching_total(counted, chosen),
        "backends": live_jobs.by_backend(counted, chosen),
        "pools": pools,
        "more_pools": more_pools,
        "orphans": orphans,
        "more_orphans": more_orphans,
    }


First = Annotated[date | None, Query(alias="from", description="First day, in UTC")]
Last = Annotated[date | None, Query(alias="to", description="Last day; default today")]
Days = Annotated[int, Query(ge=1, le=LONGEST_DAYS, description="Number of days without `from`")]


@router.get("/spend", response=responses(shared.Spend, but=(404, 409, 413)))
def get_spend(
    request: HttpRequest,
    first: First = None,
    last: Last = None,
    days: Days = DEFAULT_DAYS,
    backend: OnBackend = "",
    owner: OfOwner = "",
    limit: Annotated[int, Query(ge=1, le=1000, description="Rows of each group")] = spend.GROUPS,
) -> Any:
    """Spending by day, backend, owner, run and tag, the present rate, and a forecast for the
    calendar month. The cost of a job is spread over the time that it ran."""
    user, now = reader(request), timezone.now()
    period = _period(now.date(), first, last, days)
    return spend.spend(user, period, JobFilter(backend=backend, owner=owner), now=now, limit=limit)


@router.get(
    "/spend.{format}",
    response={401: Problem, 403: Problem, 422: Problem, 501: Problem},
    openapi_extra=FILES,
)
def export_spend(
    request: HttpRequest,
    format: Format,  # type: ignore[valid-type]
    first: First = None,
    last: Last = None,
    days: Days = DEFAULT_DAYS,
    backend: OnBackend = "",
    owner: OfOwner = "",
) -> Any:
    """Spending as one table: a row for the total and for each day, backend, owner, run and tag.
    ``by`` is the kind of the row. A period with too many jobs is refused."""
    user, now = reader(request), timezone.now()
    period = _period(now.date(), first, last, days)
    chosen, most = JobFilter(backend=backend, owner=owner), spend.MOST_ATTEMPTS
    found = spend.spend(user, period, chosen, now=now, limit=most)
    if not found["complete"]:
        raise Invalid([at("from", f"expected a period of at most {most} jobs, found more")])
    names = filter(None, ("spend", slugify(owner), slugify(backend)))
    name = f"{'-'.join(names)}-{period.first}-{period.last}.{format}"
    return table_file(
        request, spend_export.COLUMNS, spend_export.chunks(found), name=name, format=format
    )


def _period(today: date, first: date | None, last: date | None, days: int) -> Period:
    """The period of a request. Raises :class:`Invalid`."""
    try:
        period = Period.until(last or today, first=first, days=days)
    except OverflowError:
        raise Invalid([at("to", f"expected a later day, found {last}")]) from None
    if problem := period.problem(today=today):
        raise Invalid([at("from", problem)])
    return period
