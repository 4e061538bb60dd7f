"""Texts of addresses and forms."""

from __future__ import annotations

from django.http import QueryDict


def text_of(values: QueryDict, name: str) -> str:
    """Return a parameter that a database query can contain, '' if it is missing.

    PostgreSQL rejects NUL in a query. Its replacement is in no column, so such a text matches
    nothing.
    """
    return str(values.get(name, "")).replace("\0", "\ufffd")
