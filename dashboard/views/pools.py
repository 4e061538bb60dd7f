"""Pools of an active run: change their size, and add one."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from dashboard.forms import PoolChoices, PoolForm, initial_of, option_help
from dashboard.views.access import run_to_operate, signed_in, to_tab
from runs.actions import replicas_and_pools
from runs.exceptions import InvalidRun
from runs.models import Run
from runs.queries import fleet
from runs.submit import preflight
from runs.submit.run_draft import PoolDraft


@require_POST
def scale(request: HttpRequest, run_id: Any, pool_id: int) -> HttpResponse:
    """Set the number of replicas to ``count``. ``max_price_usd_h`` is the highest price per replica
    from its next launch on: empty for no limit; if left out, the limit does not change."""
    run, user = run_to_operate(request, run_id), signed_in(request)
    pool = get_object_or_404(run.pools, pk=pool_id)
    wanted = request.POST.get("count", "")
    try:
        if not wanted.isdecimal() or len(wanted) > 6:
            raise InvalidRun("pools", f"expected a number of replicas, found {wanted[:20]!r}")
        if "max_price_usd_h" in request.POST:
            limit = _limit(request.POST["max_price_usd_h"])
            if replicas_and_pools.limit_price(pool, limit, actor=user):
                messages.success(request, f"{fleet.pool_name(pool)}: max price changed.")
                if int(wanted) == pool.count:
                    return to_tab(run.pk, "replicas")
        change = replicas_and_pools.scale_pool(pool, int(wanted), actor=user)
    except InvalidRun as error:
        messages.error(request, f"{fleet.pool_name(pool)} was not changed: {error.message}.")
    else:
        change_text = (
            f"{abs(change)} {'more' if change > 0 else 'fewer'}" if change else "no change"
        )
        messages.success(request, f"{fleet.pool_name(pool)}: {wanted} wanted, {change_text}.")
    return to_tab(run.pk, "replicas")


def _limit(text: str) -> float | None:
    try:
        return float(text) if text.strip() else None
    except ValueError:
        raise InvalidRun("pools", f"expected a max price, found {text[:20]!r}") from None


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def add(request: HttpRequest, run_id: Any) -> HttpResponse:
    """The form of one pool, validated like a pool of the submit form."""
    run, user = run_to_operate(request, run_id), signed_in(request)
    choices = PoolChoices.load(user)
    if request.method != "POST":
        form = PoolForm(index=0, choices=choices, initial=initial_of(PoolDraft()))
        return _page(request, run, form)
    form = PoolForm(request.POST, index=0, choices=choices)
    if not form.is_valid() or not _passes(run, form):
        return _page(request, run, form)
    try:
        pool = replicas_and_pools.add_pool(run, form.draft(), actor=user)
    except InvalidRun as error:
        form.place(error.field.removeprefix("pools.0."), error.message)
        return _page(request, run, form)
    messages.success(request, f"{fleet.pool_name(pool)} added.")
    return to_tab(run.pk, "replicas")


def _passes(run: Run, form: PoolForm) -> bool:
    for problem in preflight.check_new_pool(run, form.draft()):
        form.place(problem.field.removeprefix("pools.0."), problem.message)
    return not form.errors


def _page(request: HttpRequest, run: Run, form: PoolForm) -> HttpResponse:
    context = {
        "run": run,
        "pool": form,
        "errors": list(form.named_errors()),
        "option_help": option_help(),
    }
    return render(request, "runs/pool_add.html", context, status=422 if form.errors else 200)
