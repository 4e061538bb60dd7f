"""HTML with values, for parts that a page has hundreds of times."""

from __future__ import annotations

from functools import lru_cache
from html import escape

from django.utils.safestring import SafeString


def fill(html: str, *values: object, **named: object) -> SafeString:
    """The same as ``format_html`` in a third of its CPU time: lazy texts are not supported."""
    return SafeString(
        html.format(
            *[value if type(value) in _AS_IS else _escape(str(value)) for value in values],
            **{
                name: value if type(value) in _AS_IS else _escape(str(value))
                for name, value in named.items()
            },
        )
    )


_AS_IS = frozenset({SafeString, int})
_SHORT = 200
_escape_short = lru_cache(maxsize=4096)(escape)
"""The cells of a page have many texts in common."""


def _escape(text: str) -> str:
    return _escape_short(text) if len(text) <= _SHORT else escape(text)
