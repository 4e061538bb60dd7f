"""Budgets of owners and tags: every role sees them, administrators change them."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from dashboard.access import or_404
from dashboard.forms.settings import BudgetForm
from dashboard.views.access import reader
from dashboard.views.settings_access import add_problem, administrator, is_administrator
from runs.actions import budgets as actions
from runs.exceptions import InvalidRun
from runs.models import Budget
from runs.queries import budgets as queries
from runs.queries import listing

NAMES = 100
"""Owners, and tags, that the form suggests."""


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def budgets(request: HttpRequest) -> HttpResponse:
    """The list, and a form for another."""
    reader(request)
    if request.method != "POST":
        return _page(request, BudgetForm(initial=_asked(request)))
    return _save(request, BudgetForm(request.POST), None)


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def budget(request: HttpRequest, budget_id: int) -> HttpResponse:
    """Change a budget."""
    administrator(request)
    found = or_404(queries.find(budget_id))
    data = request.POST if request.method == "POST" else None
    return _save(request, BudgetForm(data, initial=_initial(found)), found)


def _save(request: HttpRequest, form: BudgetForm, changed: Budget | None) -> HttpResponse:
    """Store a valid form; otherwise show it, with what is wrong."""
    actor = administrator(request)
    if form.is_valid():
        try:
            saved = actions.save_budget(**form.values(), actor=actor, budget=changed)
        except InvalidRun as error:
            add_problem(form, error)
        else:
            messages.success(request, f"Budget of {saved} saved.")
            return redirect("settings-budgets")
    number = None if changed is None else changed.pk
    return _page(request, form, changed=number, status=422 if form.errors else 200)


@require_POST
def delete(request: HttpRequest, budget_id: int) -> HttpResponse:
    actor, found = administrator(request), or_404(queries.find(budget_id))
    actions.delete_budget(found, actor=actor)
    messages.success(request, f"Budget of {found} deleted.")
    return redirect("settings-budgets")


def _initial(budget: Budget) -> dict[str, object]:
    names = ("scope", "name", "period", "amount_usd")
    return {name: getattr(budget, name) for name in names} | {
        "warn_percent": f"{100 * budget.warn_at:.6g}"
    }


def _asked(request: HttpRequest) -> dict[str, str]:
    """Values of the address, e.g. of a link on the page of spending."""
    return {name: value for name in ("scope", "name") if (value := request.GET.get(name, ""))}


def _names(request: HttpRequest) -> list[str]:
    """Owners and tags of the newest runs, the most frequent first."""
    found = (listing.counted(name, user=request.user) for name in ("owner", "tag"))
    return [name for counts in found for name, _ in counts.most_common(NAMES)]


def _page(
    request: HttpRequest, form: BudgetForm, *, changed: int | None = None, status: int = 200
) -> HttpResponse:
    context = {
        "form": form,
        "changed": changed,
        "budgets": queries.budget_rows(request.user, now=timezone.now()),
        "names": _names(request) if is_administrator(request) else (),
        "can_change": is_administrator(request),
    }
    return render(request, "settings/budgets.html", context, status=status)
