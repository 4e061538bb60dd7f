"""Sweeps: the list, and the runs of one, ranked. Each makes a constant number of queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.db.models import Count, F, Q, QuerySet, Sum, Value
from django.db.models.functions import Coalesce

from archipelago import sweep_rows
from diloco.protocol.settings import setting_fields
from runs.json_values import finite, iso, mapping, row_of
from runs.models import Sweep
from runs.permissions import can_view
from runs.queries import selectors
from runs.queries.comparison import MEASURES, measured
from runs.states import RUN_ACTIVE, RUN_ENDED, RunState

PAGE = 50
BETTER = {measure.name: measure.better for measure in MEASURES if measure.better}


def sweeps_for(user: AbstractBaseUser | AnonymousUser) -> QuerySet[Sweep]:
    """Sweeps that a user can view, annotated for :func:`sweep_row`."""
    if not can_view(user):
        return Sweep.objects.none()
    held = Q(runs__state=RunState.QUEUED, runs__sweep_held=True)
    return Sweep.objects.select_related("owner").annotate(
        run_count=Count("runs"),
        held_count=Count("runs", filter=held),
        active_count=Count("runs", filter=Q(runs__state__in=sorted(RUN_ACTIVE)) & ~held),
        ended_count=Count("runs", filter=Q(runs__state__in=sorted(RUN_ENDED))),
        spent=Coalesce(Sum("runs__cost_usd"), Value(0.0)) + F("deleted_usd"),
    )


def sweep_row(sweep: Sweep, *, unpriced: bool = False) -> dict[str, Any]:
    """A sweep from :func:`sweeps_for` as the API returns it."""
    annotated: Any = sweep
    return row_of(
        sweep_rows.Sweep,
        sweep,
        id=str(sweep.pk),
        owner=sweep.owner.get_username(),
        created_at=iso(sweep.created_at),
        parameters=parameters(sweep),
        runs=annotated.run_count,
        held=annotated.held_count,
        active=annotated.active_count,
        ended=annotated.ended_count,
        cost_usd=finite(annotated.spent),
        cost_known=not unpriced,
    )


def parameters(sweep: Sweep) -> list[dict[str, Any]]:
    """The swept fields with labels, as far as the column holds them."""
    labels = {f"settings.{spec.name}": spec.label for spec in setting_fields()}
    stored = sweep.parameters if isinstance(sweep.parameters, list) else []
    result = []
    for row in map(mapping, stored):
        field = str(row.get("field", ""))
        values = row.get("values")
        label = labels.get(field, field.rpartition(".")[2].replace("_", " ").capitalize())
        listed = list(values) if isinstance(values, list | tuple) else []
        result.append({"field": field, "label": label, "values": listed})
    return result


def ranked(
    sweep: Sweep, user: AbstractBaseUser | AnonymousUser, metric: str = ""
) -> dict[str, Any]:
    """A sweep from :func:`sweeps_for` with its runs, the best first; runs without a value last, in
    the order of the sweep."""
    metric = metric if metric in BETTER else sweep.metric
    runs = list(selectors.runs_for(user).filter(sweep=sweep).order_by("sweep_index"))
    values = [finite(row.get(metric)) for row in measured(runs)]
    order = sorted(range(len(runs)), key=lambda i: _key(values[i], metric))
    known = sum(value is not None for value in values)
    return {
        "sweep": sweep_row(sweep, unpriced=any(getattr(run, "unpriced", 0) for run in runs)),
        "metric": metric,
        "runs": [
            {
                "rank": place if place <= known else None,
                "value": values[index],
                "values": dict(mapping(runs[index].sweep_values)),
                "held": runs[index].sweep_held and runs[index].state == RunState.QUEUED,
                "run": selectors.run_header(runs[index]),
            }
            for place, index in enumerate(order, start=1)
        ],
    }


def _key(value: float | None, metric: str) -> tuple[bool, float]:
    if value is None:
        return True, 0.0
    return False, -value if BETTER.get(metric) == "higher" else value


def numbers(rows_of_runs: Sequence[Mapping[str, Any]], field: str) -> list[float] | None:
    """The values of a swept field as numbers, for a chart; None if they are not numbers."""
    values = [row["values"].get(field) for row in rows_of_runs]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return [float(value) for value in values]
    return None


def find(user: AbstractBaseUser | AnonymousUser, sweep_id: Any) -> Sweep | None:
    return sweeps_for(user).filter(pk=sweep_id).first()
