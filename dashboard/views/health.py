"""For machines that look after this one: ``/healthz``, ``/readyz`` and ``/metrics``."""

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
    """This process answers. Nothing is asked: a broker that is away must restart no web server."""
    return HttpResponse("ok\n", content_type="text/plain")


@login_not_required
@never_cache
@require_safe
def readyz(request: HttpRequest) -> JsonResponse:
    """503 unless database, broker and a worker are there."""
    found = health.readiness()
    well = all(said == "ok" for said in found.values())
    answer = JsonResponse({"ready": well, **found}, status=200 if well else 503)
    # Probes ask every few seconds: Django would log each 503 as a server error.
    answer._has_been_logged = True  # type: ignore[attr-defined]
    return answer


@login_not_required
@csrf_exempt
@never_cache
@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """For whoever may look at runs: a token with the scope ``read``, or a session."""
    try:
        who = ByToken()(request) or BySession(csrf=False)(request)
        if who is None:
            return _refused(401, "expected a token or a session, found none")
        request.auth = who  # type: ignore[attr-defined]
        reader(request)
    except HttpError as error:
        return _refused(error.status_code, str(error))
    return HttpResponse(numbers.exposition(), content_type=numbers.CONTENT_TYPE)


def _refused(status: int, why: str) -> HttpResponse:
    response = HttpResponse(f"{why}\n", status=status, content_type="text/plain; charset=utf-8")
    if status == 401:
        response["WWW-Authenticate"] = 'Bearer realm="archipelago"'
    return response
