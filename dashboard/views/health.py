"""Endpoints for monitoring: ``/healthz``, ``/readyz`` and ``/metrics``."""

from __future__ import annotations

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_safe
from ninja.errors import HttpError

from dashboard.api.auth import BySession, ByToken, reader
from runs.backends import health
from runs.queries import metrics as numbers


@login_not_required
@never_cache
@require_safe
def healthz(request: HttpRequest) -> HttpResponse:
    """Liveness. Checks nothing else: a missing broker must not restart the web server."""
    return HttpResponse("ok\n", content_type="text/plain")


@login_not_required
@never_cache
@require_safe
def readyz(request: HttpRequest) -> JsonResponse:
    """Readiness: 503 unless database, broker and a worker respond."""
    checks = health.readiness()
    ready = all(status == "ok" for status in checks.values())
    response = JsonResponse({"ready": ready, **checks}, status=200 if ready else 503)
    # Probes poll every few seconds: without this Django logs each 503 as a server error.
    response._has_been_logged = True  # type: ignore[attr-defined]
    return response


@login_not_required
@csrf_exempt
@never_cache
@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """Prometheus metrics, for a token with the scope ``read`` or a session."""
    try:
        who = ByToken()(request) or BySession(csrf=False)(request)
        if who is None:
            return _refused(401, "expected a token or a session, found none")
        request.auth = who  # type: ignore[attr-defined]
        reader(request)
    except HttpError as error:
        return _refused(error.status_code, str(error))
    return HttpResponse(numbers.exposition(), content_type=numbers.CONTENT_TYPE)


def _refused(status: int, message: str) -> HttpResponse:
    response = HttpResponse(f"{message}\n", status=status, content_type="text/plain; charset=utf-8")
    if status == 401:
        response["WWW-Authenticate"] = 'Bearer realm="archipelago"'
    return response
