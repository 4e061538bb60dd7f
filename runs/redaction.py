"""Redact the secrets that this process has decrypted from all text that it outputs.

This is a second line of defence. Our code puts no secret into a message, but libraries quote their
input: an HTTP client repeats the header that it cannot send. Text that is stored, logged or shown
on an error page passes :func:`redact`, which searches for the values of the secrets.

Values shorter than :data:`SHORTEST` characters are not redacted, because they occur by chance.
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
"""Number of temporary secrets that are remembered, newest first."""

_SECRET_NAME = re.compile(r"(?i)key|token|secret|password|signature")
_OF_CONNECTION = re.compile(r"(?i)(?:AccountKey|SharedAccessSignature)=([^;]+)")


class Known:
    """Values of the known secrets.

    Every log line passes through here, and plain searches are many times faster than one regular
    expression with hundreds of alternatives.
    """

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
            # The plain value, and its forms in URLs and in HTML; longest first.
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
    """Redact these values from now on, and the keys and tokens inside those that are documents.

    ``passing``: the values expire; they are forgotten once there are many newer ones.
    """
    _known.add(values, passing=passing)


def redact(text: str) -> str:
    return _known.strike_out(text)


TEXT_LIMIT = 4000
"""Characters of a message or a reason, by default."""


def clean_text(text: str, limit: int = TEXT_LIMIT) -> str:
    """Make external text safe to store in any database.

    Removes NUL characters and lone surrogates (valid in JSON, invalid in UTF-8), limits the length
    and redacts secrets.
    """
    text = redact(text).replace("\x00", "�").encode(errors="replace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"


class RedactingFormatter(logging.Formatter):
    """Format like ``inner`` and redact secrets, in tracebacks as well."""

    def __init__(
        self, fmt: str | None = None, *, inner: logging.Formatter | None = None, **options: Any
    ) -> None:
        super().__init__(fmt, **options)
        self.inner = inner or logging.Formatter(fmt, **options)

    def format(self, record: logging.LogRecord) -> str:
        return redact(self.inner.format(record))


def _parts(value: str) -> Iterator[str]:
    """A value and, if it is a document such as a kubeconfig, the secrets inside it."""
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
        except (ValueError, RecursionError):
            return None
    if "\n" not in value:
        return None
    import yaml

    try:
        return yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def _leaves(node: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the texts of a document with the name of each. An object that aliases of YAML repeat is
    visited once, and no depth is too large."""
    waiting, seen = [(name, node)], set[int]()
    while waiting:
        name, node = waiting.pop()
        if isinstance(node, str):
            yield name, node
        elif isinstance(node, dict | list) and id(node) not in seen:
            seen.add(id(node))
            items = node.items() if isinstance(node, dict) else ((name, item) for item in node)
            waiting += [(str(key), value) for key, value in items]
