"""The address of a runs list: query, order, columns, groups, and whether to show differences.

It holds everything that decides what the list shows, so that a list can be shared, saved as a view,
and restored. Default values are left out; the page and the selection are not part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Self
from urllib.parse import urlencode

from django.http import QueryDict

from runs.models import SavedView
from runs.queries import groups, table
from runs.queries.listing import NEWEST, Order


def known_group(text: str) -> str:
    return text if text in groups.BY else ""


@dataclass(frozen=True, kw_only=True)
class ListAddress:
    query: str = ""
    order: Order = field(default_factory=Order)
    columns: tuple[str, ...] = table.DEFAULT
    differing: bool = False
    group: str = ""
    """One of :data:`runs.queries.groups.BY`; '' lists the runs themselves."""

    @classmethod
    def of(cls, values: QueryDict) -> Self:
        """Parse query parameters. Columns are comma-separated, or repeated by form checkboxes."""
        return cls(
            query=values.get("q", "").strip(),
            order=Order.of(values.get("sort", NEWEST)),
            columns=table.chosen(",".join(values.getlist("columns")).split(",")),
            differing=bool(values.get("differ")),
            group=known_group(values.get("group", "")),
        )

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Parse a query string."""
        return cls.of(QueryDict(text.removeprefix("?")))

    @classmethod
    def of_view(cls, view: SavedView) -> Self:
        return cls(
            query=view.query,
            order=Order.of(view.sort),
            columns=table.chosen(view.columns),
            differing=view.differing,
            group=known_group(view.group),
        )

    def but(self, **changes: Any) -> Self:
        """A copy with changes."""
        return replace(self, **changes)

    def __str__(self) -> str:
        """The query string of the first page; at least ``?``, so that it works as a link."""
        return _text(self)


@lru_cache(maxsize=1024)
def _text(address: ListAddress) -> str:
    values = {
        "q": address.query,
        "sort": "" if str(address.order) == NEWEST else str(address.order),
        "columns": table.written(address.columns),
        "differ": "1" if address.differing else "",
        "group": address.group,
    }
    return f"?{urlencode({name: value for name, value in values.items() if value}, safe=',')}"
