"""The Checkpoints tab: the checkpoints of a run in the bucket, and the actions on them."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.shortcuts import get_object_or_404, render
from django.utils.text import slugify
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from dashboard.downloads import attachment
from dashboard.views.access import run_to_operate, run_to_see, signed_in, to_tab
from diloco.store.base import MissingKey, StoreError
from runs import permissions
from runs.actions import lifecycle
from runs.exceptions import ActionRefused
from runs.export import hub_upload
from runs.ingest.objects import DigestMismatch, verified_pieces
from runs.ingest.stores import store_for
from runs.models import Checkpoint, Run
from runs.queries import run_page
from runs.submit import clone_and_fork

SHOWN = 100


@require_safe
@never_cache
def checkpoints(request: HttpRequest, run_id: Any) -> HttpResponse:
    """Content of the tab. The page reloads it as rounds are committed."""
    run = run_to_see(request, run_id)
    return render(
        request, "runs/_checkpoints.html", {"run": run, **checkpoint_context(request, run)}
    )


def checkpoint_context(request: HttpRequest, run: Run) -> dict[str, Any]:
    """Template context of the tab. At most six queries."""
    can_operate = permissions.can_operate(request.user, run)
    rows = run_page.newest_checkpoints(run, limit=SHOWN + 1)
    forkable = set(clone_and_fork.forkable(run))
    return {
        "can_operate": can_operate,
        "can_submit": permissions.can_submit(request.user),
        "checkpoints": [
            {"row": row, "kept": row.final or row.round in forkable, "fork": not row.final}
            for row in rows[:SHOWN]
        ],
        "more_checkpoints": len(rows) > SHOWN,
        **run_page.sample_of(run, rows),
        "resumable": can_operate and run.ended and not lifecycle.why_not_resumed(run),
        "hub_credentials": hub_upload.credentials() if can_operate else (),
        "exports": run_page.newest_events(run, hub_upload.KIND, limit=5),
    }


@require_safe
@never_cache
def download(
    request: HttpRequest, run_id: Any, checkpoint_id: int
) -> HttpResponse | StreamingHttpResponse:
    """Stream the weights to a user who can operate the run. If they turn out to be damaged, the
    connection ends before the announced length."""
    checkpoint = _checkpoint(request, run_id, checkpoint_id)
    try:
        body = verified_pieces(store_for(checkpoint.run), checkpoint)
    except MissingKey:
        raise Http404(f"{checkpoint.key} has been deleted from the bucket") from None
    except (StoreError, DigestMismatch, ValueError) as error:
        return HttpResponse(
            f"Download failed: {error}\n",
            status=502,
            content_type="text/plain; charset=utf-8",
        )
    kind = "final" if checkpoint.final else f"round-{checkpoint.round}"
    name = f"{slugify(checkpoint.run.name) or 'run'}-{kind}.safetensors"
    response = attachment(
        request, body, name=name, content_type="application/octet-stream", database=False
    )
    response["Content-Length"] = str(checkpoint.size_bytes)
    return response


@require_POST
def export(request: HttpRequest, run_id: Any, checkpoint_id: int) -> HttpResponse:
    checkpoint = _checkpoint(request, run_id, checkpoint_id)
    try:
        hub_upload.ask(
            checkpoint,
            credential_id=request.POST.get("credential", ""),
            repository=request.POST.get("repository", ""),
            private=bool(request.POST.get("private")),
            actor=signed_in(request),
        )
    except ActionRefused as error:
        messages.error(request, f"Upload failed: {error}.")
    else:
        messages.success(request, "Upload started. The run's events will show the result.")
    return to_tab(run_id, "checkpoints")


def _checkpoint(request: HttpRequest, run_id: Any, checkpoint_id: int) -> Checkpoint:
    run = run_to_operate(request, run_id)
    checkpoint = get_object_or_404(run.checkpoints, pk=checkpoint_id)
    checkpoint.run = run
    return checkpoint
