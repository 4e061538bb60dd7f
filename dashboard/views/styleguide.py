"""The style guide: every token and component on one page. Only with ``ARCHIPELAGO_DEBUG``.

``tests/browser/test_styleguide.py`` compares pictures of it, so a change of a component is visible
in a review.
"""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from dashboard.presentation.badges import LOOKS
from diloco.protocol.telemetry import PHASES

CONNECTIONS = (
    ("connecting", "Connecting"),
    ("live", "Live"),
    ("polling", "Polling every 5 s"),
    ("silent", "No worker"),
    ("offline", "Offline, last update 57 s ago"),
    ("ended", "Ended"),
)
RAMPS = ("accent", "green", "amber", "red", "violet")
STEPS = ("bg", "subtle", "border", "solid", "text")
ROLES = (
    *("bg", "surface", "raised", "sunken", "hover", "line-soft", "line", "line-strong"),
    *("text", "text-2", "text-3", "accent", "accent-hover", "focus", "danger"),
)


@require_safe
def styleguide(request: HttpRequest) -> HttpResponse:
    context = {
        "neutral": [f"n-{step}" for step in range(1, 13)],
        "ramps": [(name, [f"{name}-{step}" for step in STEPS]) for name in RAMPS],
        "roles": ROLES,
        "series": [f"r-{number}" for number in range(8)]
        + [f"p-{phase}" for phase in ("bootstrap", "start", *PHASES)],
        "sizes": (28, 20, 16, 14, 13, 12, 11),
        "weights": (400, 500, 600),
        "spaces": (4, 8, 12, 16, 24, 32, 48),
        "states": LOOKS,
        "connections": CONNECTIONS,
        "tones": ("queued", "running", "succeeded", "warning", "failed"),
        "banners": ("info", "success", "warning", "error"),
        "table": [
            ("running", "Five backends", "olga · modal, kubernetes", 0.6, "2.312", "$12.35 +"),
            ("succeeded", "Baseline, H = 90", "oscar · local", 1.0, "2.202", "$0.00"),
            (
                "failed",
                "A name that is too long for its column",
                "olga · sagemaker",
                0.1,
                "n/a",
                "-",
            ),
        ],
    }
    return render(request, "styleguide/styleguide.html", context)
