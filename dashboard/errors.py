"""What error pages and reports may show.

Django hides settings and headers by their names, and variables of functions only where ``DEBUG`` is
off and the function says so. Here it is the same with ``DEBUG``, and whatever holds a secret that
this process has opened is hidden by its value: :mod:`runs.redaction`.
"""

from __future__ import annotations

import re
from collections.abc import ItemsView
from pprint import pformat
from typing import Any

from django.http import HttpRequest
from django.utils.safestring import SafeString, mark_safe
from django.views.debug import ExceptionReporter, SafeExceptionReporterFilter

from runs.redaction import redact

_SENT = re.compile(r"(?i)secret|token|key|password|kubeconfig|connection_string|variable_")


class SecretFilter(SafeExceptionReporterFilter):
    # URLs of database and broker hold passwords.
    hidden_settings = re.compile(
        SafeExceptionReporterFilter.hidden_settings.pattern + "|URL|BROKER|DATABASE", flags=re.I
    )

    def is_active(self, request: HttpRequest | None) -> bool:
        return True

    def get_post_parameters(self, request: HttpRequest | None) -> dict[str, Any]:
        found = super().get_post_parameters(request)
        hidden = self.cleansed_substitute
        return {
            name: hidden if _SENT.search(name) else self.cleanse_setting(name, found[name])
            for name in found
        }

    def get_traceback_frame_variables(
        self, request: HttpRequest | None, tb_frame: Any
    ) -> ItemsView[str, Any]:
        shown = super().get_traceback_frame_variables(request, tb_frame)
        return {name: _without_secrets(value) for name, value in shown}.items()


class SecretReporter(ExceptionReporter):
    """The page, with what exceptions say in it."""

    def get_traceback_html(self) -> SafeString:
        return mark_safe(redact(super().get_traceback_html()))  # noqa: S308 -- the page itself

    def get_traceback_text(self) -> SafeString:
        return mark_safe(redact(super().get_traceback_text()))  # noqa: S308


class _Shown:
    """Stands for a value on the page, which prints its ``repr``."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _without_secrets(value: Any) -> Any:
    try:
        text = pformat(value)
    except Exception:
        return value  # the page says so itself
    struck_out = redact(text)
    return value if struck_out == text else _Shown(struck_out)
