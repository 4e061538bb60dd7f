"""What is around the rows of the runs list, as HTML: heads, the choice of columns, and figures.

They are formatted here for the same reason as :mod:`dashboard.presentation.run_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from django.utils.safestring import SafeString

from dashboard.presentation.markup import fill
from runs.queries import table

NOTHING = SafeString("")
CHECKED = SafeString(" checked")
NUMBER = SafeString(' class="num"')
HEAD = '<th scope="col" role="columnheader"{}{}>{}</th>\n        '
CHOICE = '<li><label><input type="checkbox" name="columns" value="{}"{}>{}</label></li>'
FIGURE = '<li title="{help}">{start}<b data-total="{name}">{text}</b> {label}{end}</li>'
LINK = '<a href="{}" title="{}">'
LINK_END = SafeString("</a>")


@dataclass(frozen=True, kw_only=True)
class Head:
    """The head of a column.

    Attributes:
        address: of the list sorted by the column; '' if it has no order.
        sorted: value of ``aria-sort``; '' if the list is not sorted by the column.
    """

    label: str
    number: bool = False
    address: str = ""
    sorted: str = ""

    def html(self) -> SafeString:
        return fill(
            HEAD,
            NUMBER if self.number else NOTHING,
            fill(' aria-sort="{}"', self.sorted) if self.sorted else NOTHING,
            fill('<a href="{}">{}</a>', self.address, self.label) if self.address else self.label,
        )


@lru_cache(maxsize=256)
def column_choices(shown: tuple[str, ...]) -> SafeString:
    """The items of the menu that selects columns."""
    return SafeString(
        "".join(
            fill(CHOICE, c.name, CHECKED if c.name in shown else NOTHING, c.label)
            for c in table.COLUMNS
            if c.name != table.ALWAYS
        )
    )


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure above the list: ``text`` is '' until the totals are known, ``address`` '' without a
    link."""

    name: str
    label: str
    help: str
    text: str = ""
    address: str = ""

    def html(self) -> SafeString:
        return fill(
            FIGURE,
            name=self.name,
            label=self.label,
            help=self.help,
            text=self.text,
            start=fill(LINK, self.address, self.help) if self.address else NOTHING,
            end=LINK_END if self.address else NOTHING,
        )
