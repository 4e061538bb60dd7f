"""Choose the theme of the pages in this browser."""

from __future__ import annotations

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest, HttpResponseRedirect
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_POST

from dashboard.theme import COOKIE, YEAR_S, Theme


@require_POST
def choose(request: HttpRequest) -> HttpResponse:
    """Remember ``theme`` in a cookie and return to the page at ``next``."""
    wanted = request.POST.get("theme", "")
    if wanted not in list(Theme):
        return HttpResponseBadRequest(f"Choose one of: {', '.join(Theme)}")
    back = request.POST.get("next", "")
    if not url_has_allowed_host_and_scheme(back, {request.get_host()}, request.is_secure()):
        back = reverse("runs")
    response = HttpResponseRedirect(back)
    response.set_cookie(
        COOKIE,
        wanted,
        max_age=YEAR_S,
        secure=settings.SESSION_COOKIE_SECURE,
        httponly=True,
        samesite="Lax",
    )
    return response
