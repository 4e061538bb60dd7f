"""Format of the log: text, or one JSON document per line.

``ARCHIPELAGO_LOG_FORMAT=json`` selects JSON. A document has ``at`` (UTC), ``level``, ``logger``,
``message``, ``process``, ``exception`` if there is one, and ``run``, ``replica`` and ``round`` if
it concerns them. These come from the call (``extra={"run": ...}``) or from the task
(:mod:`runs.log_context`). Secrets are redacted in both formats (:mod:`runs.redaction`).

Celery and uvicorn install their own handlers; :func:`configure_handlers` applies our format.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from runs.log_context import FIELDS, current
from runs.redaction import RedactingFormatter, redact

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
FORMATS = ("text", "json")


class ContextFilter(logging.Filter):
    """Add the context (run, replica, round) to every record as attributes."""

    def filter(self, record: logging.LogRecord) -> bool:
        context = current()
        for name in FIELDS:
            if not hasattr(record, name):
                setattr(record, name, context.get(name))
        return True


class JsonFormatter(logging.Formatter):
    """One JSON document per line."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
            "process": record.process,
        }
        context = current()
        for name in FIELDS:
            value = getattr(record, name, None)
            if value is None:
                value = context.get(name)
            if value is not None:
                document[name] = value if isinstance(value, int) else str(value)
        if record.exc_info:
            document["exception"] = redact(self.formatException(record.exc_info))
        return json.dumps(document, ensure_ascii=False)


def configure_handlers(logger: logging.Logger, format: str) -> None:
    """Apply format and redaction to all handlers of ``logger``. Text handlers keep their own
    line format."""
    for handler in logger.handlers:
        if not any(isinstance(existing, ContextFilter) for existing in handler.filters):
            handler.addFilter(ContextFilter())
        if format == "json":
            handler.setFormatter(JsonFormatter())
        elif not isinstance(handler.formatter, RedactingFormatter):
            handler.setFormatter(RedactingFormatter(inner=handler.formatter))


def config(*, format: str, level: str) -> dict[str, Any]:
    """The Django setting ``LOGGING``."""
    text = {"()": "runs.redaction.RedactingFormatter", "fmt": LINE}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"context": {"()": "dashboard.logging.ContextFilter"}},
        "formatters": {
            "line": {"()": "dashboard.logging.JsonFormatter"} if format == "json" else text
        },
        "handlers": {
            "console": {
                "class": "logging.StreamHandler",
                "formatter": "line",
                "filters": ["context"],
            }
        },
        "root": {"handlers": ["console"], "level": level},
        # Celery logs two lines per task. Failures are still logged.
        "loggers": {
            "celery.app.trace": {"level": "WARNING"},
            "celery.worker.strategy": {"level": "WARNING"},
        },
    }
