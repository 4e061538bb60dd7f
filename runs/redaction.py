"""Secrets that this process has opened are struck out of whatever it says.

A second line of defence: no code of ours puts a secret into a message, but libraries quote what
they were given (an HTTP client repeats the header it cannot send). Text that is stored, logged or
shown on an error page goes through :func:`redact`, which knows the secrets by their values.

Left out: values of fewer than :data:`SHORTEST` characters, which could stand anywhere by chance.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any
from urllib.parse import quote

STRUCK_OUT = "********"
SHORTEST = 8

_lock = threading.Lock()
_known: set[str] = set()
_pattern: re.Pattern[str] | None = None

_SECRET_NAME = re.compile(r"(?i)key|token|secret|password|signature")
_OF_CONNECTION = re.compile(r"(?i)(?:AccountKey|SharedAccessSignature)=([^;]+)")


def remember(values: Iterable[str]) -> None:
    """Strike these out from now on, and the keys and tokens within those that are documents."""
    global _pattern
    parts = {part for value in values for part in _parts(value) if len(part) >= SHORTEST}
    # As it is, and as it stands in a URL and on a page.
    found = {form for part in parts for form in (part, quote(part), quote(part, ""), escape(part))}
    with _lock:
        if found <= _known:
            return
        _known.update(found)
        longest_first = sorted(_known, key=len, reverse=True)
        _pattern = re.compile("|".join(map(re.escape, longest_first)))


def redact(text: str) -> str:
    return text if _pattern is None else _pattern.sub(STRUCK_OUT, text)


def knows(text: str) -> bool:
    """Whether there is something to strike out."""
    return _pattern is not None and _pattern.search(text) is not None


class RedactingFormatter(logging.Formatter):
    """Formats as ``inner`` does, tracebacks included, without what is secret."""

    def __init__(
        self, fmt: str | None = None, *, inner: logging.Formatter | None = None, **options: Any
    ) -> None:
        super().__init__(fmt, **options)
        self.inner = inner or logging.Formatter(fmt, **options)

    def format(self, record: logging.LogRecord) -> str:
        return redact(self.inner.format(record))


def redact_handlers(logger: logging.Logger) -> None:
    """Let every handler of ``logger`` strike secrets out, whatever format it has."""
    for handler in logger.handlers:
        if not isinstance(handler.formatter, RedactingFormatter):
            handler.setFormatter(RedactingFormatter(inner=handler.formatter))


def _parts(value: str) -> Iterator[str]:
    """A value, and what is secret within a document: nobody quotes all of a kubeconfig."""
    value = value.strip()
    yield value
    yield from _OF_CONNECTION.findall(value)
    for name, text in _leaves(_document(value), ""):
        if _SECRET_NAME.search(name) and "://" not in text:
            yield text.strip()
            if "\n" in text.strip():
                yield from (line for line in text.splitlines() if not line.startswith("-----"))


def _document(value: str) -> Any:
    if value.startswith("{"):
        try:
            return json.loads(value)
        except ValueError:
            return None
    if "\n" not in value:
        return None
    import yaml

    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return None


def _leaves(node: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, str(key))
    elif isinstance(node, list):
        for value in node:
            yield from _leaves(value, name)
    elif isinstance(node, str):
        yield name, node
