"""Budgets of owners and tags, and prices of hardware and traffic."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.http import HttpRequest
from django.utils import timezone
from ninja import Path, Router, Status
from pydantic import Field

from archipelago import frame_rows as shared
from dashboard.access import or_404
from dashboard.api.auth import ADMINISTRATORS, administrator, reader
from dashboard.api.types import NO_NUL, Body, RowId, responses
from runs.actions import budgets as budget_actions
from runs.actions import prices as price_actions
from runs.backends.price_settings import Traffic
from runs.models import Budget as BudgetRow
from runs.queries import budgets, prices

router = Router(tags=["money"])

Scheme = Annotated[str, Path(pattern=f"^({'|'.join(price_actions.SCHEMES)})$")]
Usd = Annotated[float, Field(ge=0, le=price_actions.MOST_USD, allow_inf_nan=False)]


class BudgetBody(Body):
    """``scope`` and ``name`` select the runs: of an owner, or with a tag. ``warn_at`` is the share
    of the amount that opens an alert."""

    scope: Literal["owner", "tag"]
    name: Annotated[str, Field(min_length=1, max_length=150, pattern=NO_NUL)]
    period: Literal["day", "week", "month"]
    amount_usd: Annotated[float, Field(ge=0, le=budget_actions.MOST_USD, allow_inf_nan=False)]
    warn_at: Annotated[float, Field(gt=0, le=1)] = budget_actions.DEFAULT_WARN


class HardwarePrice(Body):
    """USD per replica and hour. Null keeps the price of the catalogue."""

    price_usd_h: Usd | None = None
    spot_price_usd_h: Usd | None = None


class TrafficPriceBody(Body):
    """USD per GB (10^9 bytes) and per million requests."""

    upload_usd_gb: Usd
    download_usd_gb: Usd
    requests_usd_million: Usd


@router.get("/budgets", response=responses(list[shared.Budget], but=(404, 409, 413, 422)))
def list_budgets(request: HttpRequest) -> Any:
    """All budgets with what was spent of them, the nearest to its amount first."""
    return budgets.budget_rows(reader(request), now=timezone.now())


@router.post(
    "/budgets", auth=ADMINISTRATORS, response=responses(shared.Budget, status=201, but=(404, 409))
)
def create_budget(request: HttpRequest, body: BudgetBody) -> Any:
    """Set a budget. While it is spent, nothing is launched; running jobs continue."""
    user = administrator(request)
    return Status(201, _budget(user, budget_actions.save_budget(**body.model_dump(), actor=user)))


@router.put(
    "/budgets/{int:budget_id}",
    auth=ADMINISTRATORS,
    response=responses(shared.Budget, but=(409,)),
)
def change_budget(request: HttpRequest, budget_id: RowId, body: BudgetBody) -> Any:
    """Change a budget."""
    user, found = administrator(request), or_404(budgets.find(budget_id))
    saved = budget_actions.save_budget(**body.model_dump(), actor=user, budget=found)
    return _budget(user, saved)


@router.delete(
    "/budgets/{int:budget_id}",
    auth=ADMINISTRATORS,
    response=responses(list[shared.Budget], but=(409, 413)),
)
def delete_budget(request: HttpRequest, budget_id: RowId) -> Any:
    """Delete a budget. Returns the remaining ones."""
    user = administrator(request)
    budget_actions.delete_budget(or_404(budgets.find(budget_id)), actor=user)
    return budgets.budget_rows(user, now=timezone.now())


@router.get("/prices", response=responses(shared.Prices, but=(404, 409, 413, 422)))
def list_prices(request: HttpRequest) -> Any:
    """Prices of all hardware and of traffic, with their sources."""
    reader(request)
    return {"hardware": prices.price_rows(), "traffic": prices.traffic_rows()}


@router.put(
    "/prices/hardware/{backend}/{hardware}",
    auth=ADMINISTRATORS,
    response=responses(shared.Price, but=(409,)),
)
def set_price(request: HttpRequest, backend: str, hardware: str, body: HardwarePrice) -> Any:
    """Set prices of hardware, in place of those of the catalogue. Running jobs keep theirs."""
    user = administrator(request)
    or_404(_price(backend, hardware))
    price_actions.set_hardware_price(backend, hardware, **body.model_dump(), actor=user)
    return _price(backend, hardware)


@router.put(
    "/prices/traffic/{scheme}",
    auth=ADMINISTRATORS,
    response=responses(shared.Prices, but=(409,)),
)
def set_traffic_price(request: HttpRequest, scheme: Scheme, body: TrafficPriceBody) -> Any:
    """Set what traffic with buckets of a scheme (s3, gs, az, hf) costs."""
    user = administrator(request)
    price_actions.set_traffic_price(scheme, Traffic(**body.model_dump()), actor=user)
    return list_prices(request)


@router.delete(
    "/prices/traffic/{scheme}",
    auth=ADMINISTRATORS,
    response=responses(shared.Prices, but=(409, 413)),
)
def delete_traffic_price(request: HttpRequest, scheme: Scheme) -> Any:
    """Leave traffic with buckets of a scheme out of the cost."""
    user = administrator(request)
    price_actions.set_traffic_price(scheme, None, actor=user)
    return list_prices(request)


def _price(backend: str, hardware: str) -> dict[str, Any] | None:
    rows = prices.price_rows()
    return next((r for r in rows if (r["backend"], r["hardware"]) == (backend, hardware)), None)


def _budget(user: Any, budget: BudgetRow) -> dict[str, Any]:
    return budgets.budget_rows(user, now=timezone.now(), budgets=[budget])[0]
