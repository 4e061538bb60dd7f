"""Redaction of error pages and error reports.

By default Django hides settings and headers by name, and local variables only if ``DEBUG`` is off
and the function is marked. Here the same applies with ``DEBUG``, and every value that contains a
secret of this process is redacted: :mod:`runs.redaction`.
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
    # The URLs of database and broker contain passwords.
    hidden_settings = re.compile(
        SafeExceptionReporterFilter.hidden_settings.pattern + "|URL|BROKER|DATABASE", flags=re.I
    )

    def is_active(self, request: HttpRequest | None) -> bool:
        return True

    def get_post_parameters(self, request: HttpRequest | None) -> dict[str, Any]:
        parameters = super().get_post_parameters(request)
        hidden = self.cleansed_substitute
        return {
            name: hidden if _SENT.search(name) else self.cleanse_setting(name, parameters[name])
            for name in parameters
        }

    def get_traceback_frame_variables(
        self, request: HttpRequest | None, tb_frame: Any
    ) -> ItemsView[str, Any]:
        shown = super().get_traceback_frame_variables(request, tb_frame)
        return {name: _without_secrets(value) for name, value in shown}.items()


class SecretReporter(ExceptionReporter):
    """Error pages with redacted exception messages."""

    def get_traceback_html(self) -> SafeString:
        return mark_safe(redact(super().get_traceback_html()))  # noqa: S308 -- the page itself

    def get_traceback_text(self) -> SafeString:
        return mark_safe(redact(super().get_traceback_text()))  # noqa: S308


class _Shown:
    """Placeholder of a value: the page prints its ``repr``."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _without_secrets(value: Any) -> Any:
    try:
        text = pformat(value)
    except Exception:
        return value  # the page handles the failing repr itself
    redacted = redact(text)
    return value if redacted == text else _Shown(redacted)
