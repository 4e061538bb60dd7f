"""Rows of blocks of points: found by their places, written together.

A tick of the ingest goes through here for every replica, so the statements are written out and few:
one to find the rows of all places, one to change and one to add. Finding costs a look-up by index
for each place, however long the series are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db import connection
from django.db.models import Max

from runs.bulk import insert_rows, parts, update_rows, values
from runs.models import MetricBlock

Owner = int | None
"""A replica's id; None for the run's own series."""
Series = tuple[Owner, str]
Place = tuple[Owner, str, int, int]
"""Owner, series, level, index."""


@dataclass
class BlockRow:
    """``pk`` is None for one that is not in the table yet."""

    pk: int | None = None
    count: int = 0
    data: bytes = b""


@dataclass
class BlockRows:
    """Those of one run that were asked for. ``model``: a migration's own."""

    run_id: Any
    model: Any = MetricBlock
    known: dict[Place, BlockRow] = field(default_factory=dict)

    def find(self, places: Iterable[Place]) -> None:
        wanted = sorted(places, key=_order)
        for mine, owner in (
            ([p for p in wanted if p[0] is not None], "b.replica_id = v.column1"),
            # "= NULL" finds nothing, and "IS NOT DISTINCT FROM" is not looked up by index.
            ([(0, *p[1:]) for p in wanted if p[0] is None], "b.replica_id IS NULL"),
        ):
            for part in parts(mine):
                # A scalar query for each place: from a join, planners make a scan of all blocks.
                sql, parameters = values(part)
                one = (
                    f"SELECT b.id FROM {self._table} AS b WHERE b.run_id = %s AND {owner} AND"  # noqa: S608
                    ' b.series = v.column2 AND b.level = v.column3 AND b."index" = v.column4'
                )
                ids = f"SELECT ({one}) FROM ({sql}) AS v"  # noqa: S608
                array = connection.vendor == "postgresql"  # IN is a hash join with the table there
                among = f"= ANY(ARRAY({ids}))" if array else f"IN ({ids})"
                self._take(f"id {among}", [self._run, *parameters])

    def find_level(self, series: Series, level: int) -> None:
        """All blocks of a level."""
        owner, name = series
        mine, parameters = ("= %s", [owner]) if owner is not None else ("IS NULL", [])
        self._take(
            f"run_id = %s AND replica_id {mine} AND series = %s AND level = %s",
            [self._run, *parameters, name, level],
        )

    def coarsest(self, series: Iterable[Series]) -> dict[Series, int]:
        """Level of those that have any block. A look at all blocks of these series."""
        found: dict[Series, int] = {}
        owners: dict[Owner, list[str]] = {}
        for owner, name in series:
            owners.setdefault(owner, []).append(name)
        for owner, names in owners.items():
            levels = (
                self.model.objects.filter(run_id=self.run_id, replica_id=owner, series__in=names)
                .order_by()
                .values_list("series")
                .annotate(Max("level"))
            )
            found |= {(owner, name): level for name, level in levels}
        return found

    def of_level(self, series: Series, level: int) -> list[Place]:
        """Places that are known, in order."""
        return sorted(
            (place for place in self.known if place[:3] == (*series, level)),
            key=lambda place: place[3],
        )

    def save(self, changed: Iterable[tuple[Place, bytes]]) -> None:
        """Rows of these places with their counts, and the data given."""
        made, kept = [], []
        for place, data in changed:
            row = self.known[place]
            if row.pk is None:
                made.append((self.run_id, *place, row.count, data))
            else:
                kept.append((row.pk, (row.count, data)))
        update_rows(self.model, ("count", "data"), kept)
        names = ("run", "replica", "series", "level", "index", "count", "data")
        insert_rows(self.model, names, made)

    @property
    def _table(self) -> str:
        return str(self.model._meta.db_table)

    @property
    def _run(self) -> Any:
        return self.model._meta.get_field("run").get_db_prep_value(self.run_id, connection)

    def _take(self, where: str, parameters: Sequence[Any]) -> None:
        """Rows of the table; one that is known already stays as it is."""
        columns = 'replica_id, series, level, "index", id, count, data'
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {columns} FROM {self._table} WHERE {where}", parameters)  # noqa: S608
            for *place, pk, count, data in cursor.fetchall():
                row = BlockRow(pk=pk, count=count, data=bytes(data))
                self.known.setdefault(tuple(place), row)


def _order(place: Place) -> tuple[Any, ...]:
    return (place[0] or 0, *place[1:])
