"""The address of a runs list: query, order, columns and whether differing settings are columns.

All that decides what the list shows is in it, so that any list can be pasted, saved as a view, and
come back to. What is usual is left out; what an address has beside it (a page, a selection) is not
of the list.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self
from urllib.parse import urlencode

from django.http import QueryDict

from runs.models import SavedView
from runs.queries import table
from runs.queries.listing import NEWEST, Order


@dataclass(frozen=True, kw_only=True)
class ListAddress:
    query: str = ""
    order: Order = field(default_factory=Order)
    columns: tuple[str, ...] = table.DEFAULT
    differing: bool = False

    @classmethod
    def of(cls, values: QueryDict) -> Self:
        """Columns come as one word with commas, or as often as a form's boxes are ticked."""
        return cls(
            query=values.get("q", "").strip(),
            order=Order.of(values.get("sort", NEWEST)),
            columns=table.chosen(",".join(values.getlist("columns")).split(",")),
            differing=bool(values.get("differ")),
        )

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Of what stands behind the question mark of an address."""
        return cls.of(QueryDict(text.removeprefix("?")))

    @classmethod
    def of_view(cls, view: SavedView) -> Self:
        return cls(
            query=view.query,
            order=Order.of(view.sort),
            columns=table.chosen(view.columns),
            differing=view.differing,
        )

    def but(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def __str__(self) -> str:
        """Of the first page; relative, so that it is ``?`` at least."""
        values = {
            "q": self.query,
            "sort": "" if str(self.order) == NEWEST else str(self.order),
            "columns": table.written(self.columns),
            "differ": "1" if self.differing else "",
        }
        return f"?{urlencode({name: value for name, value in values.items() if value}, safe=',')}"
