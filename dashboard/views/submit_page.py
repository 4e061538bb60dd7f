"""The page of the submit form: its sections, the estimate, and the changes of a clone."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from dashboard.api.document import document_of
from dashboard.forms import RunForm, option_help
from dashboard.presentation import formats
from dashboard.presentation.changes import ChangeView, change_views
from dashboard.presentation.command_line import clone_command, submit_command
from dashboard.presentation.estimate import estimate as make_estimate
from dashboard.views import submit_source
from diloco.protocol.settings import SECTIONS, setting_fields
from diloco.protocol.workload import GPT_SIZES
from executors.base import Problem
from runs.backends import health, storage_health
from runs.exceptions import InvalidRun
from runs.local_access import can_use_local
from runs.models import Run
from runs.queries import run_page
from runs.submit import throughput_history
from runs.submit.changes import changes
from runs.submit.clone_and_fork import clone_of
from runs.submit.run_draft import RunDraft
from runs.submit.sweep_space import DERIVED
from runs.submit.sweeps import SweepDraft, SweepEstimate, estimate_sweep

ESSENTIAL = ("inner_lr", "batch_size", "sync_every", "total_rounds", "outer_lr")
"""Settings that are always open; the others are closed in their sections."""
TITLES = {
    "rounds": "Rounds, overlap and fragments",
    "exchange": "Compression and exchange",
    "outer": "Outer optimizer and merging",
    "inner": "Inner optimizer and schedule",
    "membership": "Quorum, stragglers and elasticity",
    "saving": "Evaluation and checkpoints",
}
"""Titles of sections by the words that a person searches for."""
OFTEN_CHANGED = ("inner_lr", "sync_every", "total_rounds", "batch_size", "outer_lr", "seed")
"""Settings that a clone offers before anything is searched for."""


@dataclass(frozen=True, kw_only=True)
class Preview:
    """The launch of a valid form. ``command`` is the command line that does the same."""

    estimate: dict[str, Any]
    changes: list[ChangeView] | None
    sweep: dict[str, Any] | None
    command: str


def preview(form: RunForm, draft: RunDraft) -> Preview:
    """Raises :class:`InvalidRun` for an invalid sweep."""
    estimate = make_estimate(draft, throughput_history.known_rates(draft.workload.to_dict()))
    result = dataclasses.asdict(estimate)
    described = document_of(draft)
    result["effective_json"] = document = json.dumps(described, indent=2)
    sweep = form.sweep_of(draft) if form.is_bound else None
    arguments = _sweep_arguments(form) if sweep else []
    origin = cloned_run(form)
    changed = None if origin is None else changes(document_of(clone_of(origin)), described)
    return Preview(
        estimate=result,
        changes=None if changed is None else change_views(changed, [p.index for p in form.pools]),
        sweep=None if sweep is None else _sweep_texts(sweep),
        command=submit_command(document, arguments)
        if origin is None or changed is None or draft.fork
        else clone_command(str(origin.pk), draft.name, changed, arguments),
    )


def cloned_run(form: RunForm) -> Run | None:
    """The run that the form is a clone of, if it still exists."""
    try:
        return run_page.by_id(form.fields["cloned"].clean(form["cloned"].value()))
    except ValidationError:
        return None


def _sweep_arguments(form: RunForm) -> list[str]:
    values = form.cleaned_data
    words = [
        word
        for line in values["sweep"].splitlines()
        if line.strip() and not line.lstrip().startswith("#")
        for word in ("--over", line.strip())
    ]
    if values.get("sweep_parallel"):
        words += ["--parallel", str(values.get("sweep_parallel"))]
    if values.get("sweep_budget_usd"):
        words += ["--budget", formats.exact(values.get("sweep_budget_usd"))]
    return words


def _sweep_texts(sweep: SweepDraft) -> dict[str, Any]:
    drafts = sweep.drafts()
    estimate = estimate_sweep(sweep, drafts)
    return {
        "runs": estimate.runs,
        "tokens": estimate.tokens,
        "usd_text": _sweep_usd(estimate),
        "fields": ", ".join(parameter.label for parameter in sweep.parameters),
    }


def _sweep_usd(estimate: SweepEstimate) -> str:
    if estimate.usd is None:
        return "unknown: the cost of a run is unknown"
    after = "" if estimate.hours is None else f", done in {formats.duration(estimate.hours * 3600)}"
    return f"about {formats.money(estimate.usd)} for {estimate.runs} runs{after}"


def page(
    request: HttpRequest,
    form: RunForm,
    draft: RunDraft | None,
    *,
    tested: dict[str, str] | None = None,
    status: int | None = None,
    dry_run: bool = False,
) -> HttpResponse:
    """``dry_run``: the draft passed all checks of a launch."""
    shown = None
    if draft is not None:
        try:
            shown = preview(form, draft)
        except InvalidRun as error:
            show(form, error.problems)
    errors = form.all_errors
    origin = cloned_run(form)
    is_local = can_use_local(request.user)
    is_fresh = request.method == "GET" and origin is None and not request.GET
    needs_bucket = is_fresh and not is_local and settings.DEFAULT_RENDEZVOUS.startswith("file:")
    context = {
        "form": form,
        "storage": storage_health.storage_problem(),
        "silent_since": health.silent_since(),
        "pools": [
            {"form": pool, "result": (tested or {}).get(f"pools.{pool.index}")}
            for pool in form.pools
        ],
        "option_help": option_help(),
        "pools_alone": len(form.pools) == 1,
        "bucket_result": (tested or {}).get("rendezvous"),
        "essential": _rows(form, ESSENTIAL),
        "sections": _sections(form),
        "open": sorted(
            _open(form, errors, request.POST.get("open", ""), is_clone=origin is not None)
            | ({"s-bucket"} if needs_bucket else set())
        ),
        "is_local": is_local,
        "needs_bucket": needs_bucket,
        "cloned": origin,
        "is_pasted": "paste" in request.POST,
        "often": [form[name] for name in OFTEN_CHANGED],
        "sizes": [{"name": name, "shape": shape} for name, shape in GPT_SIZES.items()],
        "preview": shown,
        "estimate": shown.estimate if shown else None,
        "default_rendezvous": settings.DEFAULT_RENDEZVOUS,
        "error_list": [
            {
                "field": form.input_of(name),
                "label": _label(form, name),
                "errors": messages_of_field,
            }
            for name, messages_of_field in errors.items()
        ],
        "launch_refused": status is None,
        "wrong_fields": sum(form.input_of(name) is not None for name in errors),
        "source": submit_source.offered(request),
        "dry_run": draft if dry_run else None,
    }
    return render(request, "runs/new.html", context, status=status or (422 if errors else 200))


def show(form: RunForm, problems: Any) -> None:
    """Attach problems of the domain to their fields."""
    problem: Problem
    for problem in problems:
        form.point_at(problem.field, problem.message)


def _label(form: RunForm, name: str) -> str:
    """The label of a field in the list of errors. Those of several pools name their pool."""
    field = form.input_of(name)
    for number, pool in enumerate(form.pools, 1):
        if field and len(form.pools) > 1 and name.startswith(f"{pool.prefix}."):
            return f"{field.label} of pool {number}"
    return str(field.label) if field else ""


def _sections(form: RunForm) -> list[dict[str, Any]]:
    """The closed sections of group settings."""
    assert set(TITLES) == set(SECTIONS)
    return [
        {"id": f"s-{name}", "title": title, "rows": _rows(form, _settings_of(name))}
        for name, title in TITLES.items()
    ]


def _settings_of(section: str) -> list[str]:
    return [
        spec.name
        for spec in setting_fields()
        if spec.section == section and spec.name not in {*ESSENTIAL, *DERIVED}
    ]


def _rows(form: RunForm, names: Any) -> list[dict[str, Any]]:
    units = {spec.name: spec.unit for spec in setting_fields()}
    return [{"field": form[name], "unit": units[name]} for name in names]


_PARTS = {
    "s-run": ("name", "tags"),
    "s-model": ("workload", "size", "data", "data_source", "eval_bytes"),
    "s-replicas": (),
    "s-training": ESSENTIAL,
    "s-limits": ("budget_usd", "time_limit_s"),
    "s-bucket": ("rendezvous", "store_credential"),
    "s-start": ("start", "start_timeout_s", "max_restarts"),
    "s-sweep": ("sweep", "sweep_parallel", "sweep_budget_usd", "sweep_metric"),
    "s-evaluations": (),
    "s-notify": ("notify", "trackers"),
    "s-source": ("document",),
    "s-fork": ("fork_run", "fork_round", "fork_outer"),
    **{f"s-{name}": tuple(_settings_of(name)) for name in TITLES},
}
"""Fields of each section, whose errors open it."""
_ESSENTIAL_PARTS = ("s-run", "s-model", "s-replicas", "s-training", "s-limits")


def _open(form: RunForm, errors: dict[str, Any], before: str, *, is_clone: bool) -> set[str]:
    """Ids of the open sections: those that were open when the form was sent, at first the essential
    ones, for a clone the name alone; and those with an error or with input that would be
    overlooked."""
    opened = {name for name in before.split() if name in _PARTS}
    opened = opened or set(_ESSENTIAL_PARTS[:1] if is_clone else _ESSENTIAL_PARTS)
    opened |= {name for name, fields in _PARTS.items() if set(fields) & set(errors)}
    if any(name.startswith("pools") for name in errors):
        opened.add("s-replicas")
    placed = {field for fields in _PARTS.values() for field in fields}
    if any(name in form.fields and name not in placed for name in errors):  # of a workload
        opened.add("s-model")
    if form.evaluations or "evaluations" in errors:
        opened.add("s-evaluations")
    if form.is_sweep:
        opened.add("s-sweep")
    if form["document"].value():
        opened.add("s-source")
    return opened
