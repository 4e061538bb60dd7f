"""Columns of the runs list: all columns, the selected ones, and those of differing settings.

URLs and saved views contain the names of columns; unknown names are ignored. The template renders
the cells, and :mod:`runs.queries.listing` sorts the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from runs.models import Run
from runs.queries.comparison import Difference, differences


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the list.

    Attributes:
        sort: a name of :data:`runs.queries.listing.SORTS`, '' if the column has no order.
        falls: whether the default order is descending.
        below: whether it is shown in the cell of the run's name.
    """

    name: str
    label: str
    sort: str = ""
    falls: bool = False
    number: bool = False
    below: bool = False
    default: bool = True


COLUMNS = (
    Column(name="state", label="State"),
    Column(name="name", label="Run", sort="name"),
    Column(name="owner", label="Owner", below=True),
    Column(name="backends", label="Backends", below=True),
    Column(name="tags", label="Tags", below=True),
    Column(name="replicas", label="Replicas"),
    Column(name="rounds", label="Rounds", sort="rounds", falls=True),
    Column(name="loss", label="Eval loss", sort="loss", number=True),
    Column(name="train", label="Train loss", sort="train", number=True),
    Column(name="tokens", label="Tokens", sort="tokens", falls=True, number=True),
    Column(name="speed", label="Tokens/s", number=True),
    Column(name="goodput", label="Goodput", number=True),
    Column(name="cost", label="Cost", sort="cost", falls=True, number=True),
    Column(name="rate", label="$/h", number=True),
    Column(name="started", label="Started", sort="started", falls=True, number=True),
    Column(name="ran", label="Ran for", number=True),
    Column(name="age", label="Age", sort="created", falls=True, number=True, default=False),
)
ALWAYS = "name"
"""The column with the link to the run."""
DEFAULT = tuple(column.name for column in COLUMNS if column.default)
MOST_DIFFERING = 12
"""Maximum number of columns for differing settings, to keep the table readable."""


def chosen(names: Iterable[str]) -> tuple[str, ...]:
    """The columns among ``names``, in display order; the default columns if there are none."""
    wanted = set(names) & {column.name for column in COLUMNS}
    if not wanted:
        return DEFAULT
    return tuple(c.name for c in COLUMNS if c.name in wanted | {ALWAYS})


def written(columns: Sequence[str]) -> str:
    """Columns as in a URL; '' for the default columns."""
    return "" if tuple(columns) == DEFAULT else ",".join(columns)


def differing(runs: Sequence[Run]) -> tuple[list[Difference], int]:
    """(Differences, number of further ones) in group settings and workload fields. No query."""
    result = [
        replace(d, label=_label(d))
        for d in differences(runs)
        if d.name.startswith(("settings.", "workload."))
    ]
    return result[:MOST_DIFFERING], max(len(result) - MOST_DIFFERING, 0)


def _label(difference: Difference) -> str:
    """A short column head: without the prefix of workload fields."""
    own = difference.label.removeprefix("workload.")
    return difference.label if own == difference.label else own.capitalize()
