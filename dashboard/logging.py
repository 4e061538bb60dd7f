"""How log lines are written: text for people, or one JSON document a line for machines.

``ARCHIPELAGO_LOG_FORMAT=json`` chooses the latter. A document has ``at`` (UTC), ``level``,
``logger``, ``message``, ``process``, ``exception`` where there is one, and ``run``, ``replica`` and
``round`` where it is about them: as the call says (``extra={"run": ...}``) or as the task does
(:mod:`runs.log_context`). Secrets are struck out of both (:mod:`runs.redaction`).

Celery and uvicorn bring handlers of their own; :func:`dress` gives them ours.
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
    """Lets everything through, with what it is about as attributes of the record."""

    def filter(self, record: logging.LogRecord) -> bool:
        found = current()
        for name in FIELDS:
            if not hasattr(record, name):
                setattr(record, name, found.get(name))
        return True


class JsonFormatter(logging.Formatter):
    """One document a line."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
            "process": record.process,
        }
        found = current()
        for name in FIELDS:
            value = getattr(record, name, None)
            if value is None:
                value = found.get(name)
            if value is not None:
                document[name] = value if isinstance(value, int) else str(value)
        if record.exc_info:
            document["exception"] = redact(self.formatException(record.exc_info))
        return json.dumps(document, ensure_ascii=False)


def dress(logger: logging.Logger, format: str) -> None:
    """Let every handler of ``logger`` write in ``format`` and strike secrets out. In text each
    keeps its own words."""
    for handler in logger.handlers:
        if not any(isinstance(one, ContextFilter) for one in handler.filters):
            handler.addFilter(ContextFilter())
        if format == "json":
            handler.setFormatter(JsonFormatter())
        elif not isinstance(handler.formatter, RedactingFormatter):
            handler.setFormatter(RedactingFormatter(inner=handler.formatter))


def config(*, format: str, level: str) -> dict[str, Any]:
    """Django's setting ``LOGGING``."""
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
        # Two lines for every tick of every run would bury what matters; failures are still logged.
        "loggers": {
            "celery.app.trace": {"level": "WARNING"},
            "celery.worker.strategy": {"level": "WARNING"},
        },
    }
