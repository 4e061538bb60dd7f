"""Which columns the runs list has, which of them are shown, and those of what only differs.

Names are what an address and a saved view hold; a page or a program that names others gets those
that there are. What a column shows of a run is the template's; how it is ordered is
:mod:`runs.queries.listing`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from runs.models import Run
from runs.queries.comparison import Difference, differences


@dataclass(frozen=True, kw_only=True)
class Column:
    """``sort`` is a name of :data:`runs.queries.listing.SORTS`, '' for what has no order, and
    ``falls`` whether a first press sorts downwards. ``below`` is shown in the run's own cell."""

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
    Column(name="started", label="Started", sort="started", falls=True, number=True),
    Column(name="ran", label="Ran for", number=True),
    Column(name="age", label="Age", sort="created", falls=True, number=True, default=False),
)
ALWAYS = "name"
"""It holds the link to the run."""
DEFAULT = tuple(column.name for column in COLUMNS if column.default)
MOST_DIFFERING = 12
"""Columns of what differs; a table of a hundred settings shows nothing."""


def chosen(names: Iterable[str]) -> tuple[str, ...]:
    """Those of ``names`` that are columns, each once and in the list's order; all that are shown to
    everybody where none is."""
    wanted = set(names) & {column.name for column in COLUMNS}
    if not wanted:
        return DEFAULT
    return tuple(c.name for c in COLUMNS if c.name in wanted | {ALWAYS})


def written(columns: Sequence[str]) -> str:
    """For an address; '' for what is shown to everybody."""
    return "" if tuple(columns) == DEFAULT else ",".join(columns)


def differing(runs: Sequence[Run]) -> tuple[list[Difference], int]:
    """Group settings and workload fields that are not the same in all of ``runs``, in the order
    people read them, and how many more there are than are shown. No query."""
    found = [
        replace(d, label=_label(d))
        for d in differences(runs)
        if d.name.startswith(("settings.", "workload."))
    ]
    return found[:MOST_DIFFERING], max(len(found) - MOST_DIFFERING, 0)


def _label(difference: Difference) -> str:
    """A head of a column is short: of the workload it is the field's own name."""
    own = difference.label.removeprefix("workload.")
    return difference.label if own == difference.label else own.capitalize()
