"""The Checkpoints tab: what of a run's weights lies in the bucket, and what can be done with it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from asgiref.sync import sync_to_async
from django.contrib import messages
from django.contrib.auth.models import User
from django.core.handlers.asgi import ASGIRequest
from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils.text import slugify
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from dashboard.views.access import run_to_operate, run_to_see
from diloco.protocol.workload import ByteGPTWorkload, HuggingFaceWorkload
from diloco.store.base import MissingKey, StoreError
from runs import permissions
from runs.actions import lifecycle
from runs.exceptions import CannotDo
from runs.export import hub_upload
from runs.ingest.objects import NotWhatItWas, verified_pieces
from runs.ingest.stores import store_for
from runs.models import Checkpoint, Event, ReplicaAttempt, Run
from runs.submit import clone_and_fork

SHOWN = 100
LANGUAGE_MODELS = (ByteGPTWorkload.kind, HuggingFaceWorkload.kind)


@require_safe
@never_cache
def checkpoints(request: HttpRequest, run_id: Any) -> HttpResponse:
    """The tab's content, asked for again as rounds are made."""
    run = run_to_see(request, run_id)
    return render(
        request, "runs/_checkpoints.html", {"run": run, **checkpoint_context(request, run)}
    )


def checkpoint_context(request: HttpRequest, run: Run) -> dict[str, Any]:
    """Six queries at most."""
    may_operate = permissions.may_operate(request.user, run)
    found = list(Checkpoint.objects.filter(run=run).order_by("-round", "-final")[: SHOWN + 1])
    whole = set(clone_and_fork.forkable(run))
    return {
        "may_operate": may_operate,
        "may_submit": permissions.may_submit(request.user),
        "checkpoints": [
            {"row": row, "kept": row.final or row.round in whole, "fork": not row.final}
            for row in found[:SHOWN]
        ],
        "more_checkpoints": len(found) > SHOWN,
        **_sample(run, found),
        "resumable": may_operate and run.ended and not lifecycle.why_not_resumed(run),
        "hub_credentials": hub_upload.credentials() if may_operate else (),
        "exports": Event.objects.filter(run=run, kind=hub_upload.KIND).order_by("-id")[:5],
    }


def _sample(run: Run, found: Sequence[Checkpoint]) -> dict[str, Any]:
    """The text that came with the final weights; ``sample_state`` why there is none, '' where the
    workload has none to give."""
    if run.workload.get("kind") not in LANGUAGE_MODELS:
        return {"sample": None, "sample_state": ""}
    final = next((row for row in found if row.final), None)
    if final is not None and final.sample:
        return {"sample": final.sample, "sample_state": "drawn"}
    if final is None:
        return {"sample": None, "sample_state": "no result" if run.ended else "not finished"}
    attempts = ReplicaAttempt.objects.filter(replica__run=run, ended_at=None)
    return {"sample": None, "sample_state": "on its way" if attempts.exists() else "none"}


@require_safe
@never_cache
def download(
    request: HttpRequest, run_id: Any, checkpoint_id: int
) -> HttpResponse | StreamingHttpResponse:
    """The weights, for those who may act on the run, a piece at a time: they can be large. Weights
    that turn out to be damaged end the connection before the announced length."""
    checkpoint = _checkpoint(request, run_id, checkpoint_id)
    try:
        body = verified_pieces(store_for(checkpoint.run), checkpoint)
    except MissingKey:
        raise Http404(f"{checkpoint.key} has been swept from the bucket") from None
    except (StoreError, NotWhatItWas, ValueError) as error:
        return HttpResponse(
            f"These weights cannot be downloaded: {error}\n",
            status=502,
            content_type="text/plain; charset=utf-8",
        )
    # Under ASGI Django would read a synchronous iterator to its end before it sends any of it.
    content = _asynchronous(body) if isinstance(request, ASGIRequest) else body
    response = StreamingHttpResponse(content, content_type="application/octet-stream")
    kind = "final" if checkpoint.final else f"round-{checkpoint.round}"
    name = f"{slugify(checkpoint.run.name) or 'run'}-{kind}.safetensors"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    response["Content-Length"] = str(checkpoint.size_bytes)
    response["X-Accel-Buffering"] = "no"
    return response


async def _asynchronous(body: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Each piece is read in a thread: there is no database connection to share."""

    def take() -> bytes | None:
        return next(body, None)

    while (piece := await sync_to_async(take, thread_sensitive=False)()) is not None:
        yield piece


@require_POST
def export(request: HttpRequest, run_id: Any, checkpoint_id: int) -> HttpResponse:
    checkpoint = _checkpoint(request, run_id, checkpoint_id)
    assert isinstance(request.user, User)
    try:
        hub_upload.ask(
            checkpoint,
            credential_id=request.POST.get("credential", ""),
            repository=request.POST.get("repository", ""),
            private=bool(request.POST.get("private")),
            actor=request.user,
        )
    except CannotDo as error:
        messages.error(request, f"Not uploaded: {error}.")
    else:
        messages.success(request, "A worker uploads it; what comes of it is an event of the run.")
    return redirect(f"{reverse('run', args=[run_id])}?tab=checkpoints")


def _checkpoint(request: HttpRequest, run_id: Any, checkpoint_id: int) -> Checkpoint:
    run = run_to_operate(request, run_id)
    checkpoint = get_object_or_404(Checkpoint, run=run, pk=checkpoint_id)
    checkpoint.run = run
    return checkpoint
