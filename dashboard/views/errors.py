"""Error pages with logic: a failed CSRF check, and internal errors caused by storage."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.defaults import server_error

from runs.storage_errors import StorageTrouble, storage_trouble


@dataclass(frozen=True, kw_only=True)
class _Answer:
    status: int
    heading: str
    message: str
    retry_after_s: int


_ANSWERS = {
    StorageTrouble.DISK_FULL: _Answer(
        status=507,
        heading="The server's disk is full",
        message="Nothing was saved. Running replicas are not affected. Free space on the disk "
        "of the server's state folder or of its database, then try again.",
        retry_after_s=60,
    ),
    StorageTrouble.BUSY: _Answer(
        status=503,
        heading="The database is busy",
        message="Nothing was saved. Try again in a few seconds.",
        retry_after_s=5,
    ),
    StorageTrouble.AWAY: _Answer(
        status=503,
        heading="The database can't be reached",
        message="Nothing was saved. Running replicas are not affected. The server's log has "
        "the reason; /readyz shows when the database is reachable again.",
        retry_after_s=10,
    ),
}


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    return render(request, "403_csrf.html", status=403)


def internal_error(request: HttpRequest) -> HttpResponse:
    """``handler500``. Storage failures have their own page, or JSON under ``/api/``. Django calls
    it while the exception is being handled."""
    trouble = storage_trouble(sys.exc_info()[1])
    if trouble is None:
        return server_error(request)
    answer = _ANSWERS[trouble]
    response: HttpResponse
    if request.path.startswith("/api/"):
        body = {"detail": f"{answer.heading}. {answer.message}", "errors": []}
        response = JsonResponse(body, status=answer.status)
    else:
        # Without the request: rendering its session and user would query the database.
        response = render(None, "storage_trouble.html", {"answer": answer}, status=answer.status)
    response["Retry-After"] = str(answer.retry_after_s)
    return response
