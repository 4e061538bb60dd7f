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
PASSING = 600
"""So many of the secrets that end by themselves are remembered, the newest."""

_SECRET_NAME = re.compile(r"(?i)key|token|secret|password|signature")
_OF_CONNECTION = re.compile(r"(?i)(?:AccountKey|SharedAccessSignature)=([^;]+)")


class Known:
    """Secrets by their values. Plain searches: a pattern of hundreds of words is many times as
    slow, and every line of a log goes through here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lasting: set[str] = set()
        self._passing: dict[str, None] = {}
        self._forms: tuple[str, ...] = ()

    def add(self, values: Iterable[str], *, passing: bool) -> None:
        parts = {part for value in values for part in _parts(value) if len(part) >= SHORTEST}
        with self._lock:
            if parts <= self._lasting | self._passing.keys():
                return
            if passing:
                self._passing |= dict.fromkeys(parts)
                for oldest in list(self._passing)[:-PASSING]:
                    del self._passing[oldest]
            else:
                self._lasting |= parts
            # As it is, and as it stands in a URL and on a page; what holds another first.
            forms = {
                form
                for part in (*self._lasting, *self._passing)
                for form in (part, quote(part), quote(part, ""), escape(part))
            }
            self._forms = tuple(sorted(forms, key=len, reverse=True))

    def strike_out(self, text: str) -> str:
        for form in self._forms:
            if form in text:
                text = text.replace(form, STRUCK_OUT)
        return text


_known = Known()


def remember(values: Iterable[str], *, passing: bool = False) -> None:
    """Strike these out from now on, and the keys and tokens within those that are documents.
    ``passing``: they end by themselves, and are forgotten when there are many newer ones."""
    _known.add(values, passing=passing)


def redact(text: str) -> str:
    return _known.strike_out(text)


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
