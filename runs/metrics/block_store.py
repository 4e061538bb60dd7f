"""Read and write the table of metric blocks in bulk, by the places of the blocks.

Every ingest tick of every replica uses it, so it has few, hand-written statements: one to read the
rows of all places, one to update and one to insert. Reading costs one index lookup per place,
whatever the length of the series.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.db import connection

from runs.bulk import insert_rows, parts, update_rows, values
from runs.metrics.blocks import Points
from runs.models import MetricBlock

Owner = int | None
"""Primary key of a replica; None for the series of the run itself."""
Place = tuple[Owner, str, int, int]
"""(owner, series, level, index)."""


@dataclass
class Block:
    """A row of the table. ``pk`` is None before it is inserted."""

    pk: int | None = None
    count: int = 0
    points: Points = field(default_factory=Points.empty)


def read_blocks(run: Any, places: Iterable[Place]) -> dict[Place, Block]:
    """The blocks at these places of a run, by primary key; new ones where there are none."""
    blocks = {place: Block() for place in sorted(places, key=lambda p: (p[0] or 0, *p[1:]))}
    table = MetricBlock._meta.db_table
    run_id = MetricBlock._meta.get_field("run").get_db_prep_value(run, connection)
    for group, owner in (
        ([p for p in blocks if p[0] is not None], "b.replica_id = v.column1"),
        # "= NULL" matches nothing, and "IS NOT DISTINCT FROM" uses no index.
        ([(0, *p[1:]) for p in blocks if p[0] is None], "b.replica_id IS NULL"),
    ):
        for part in parts(group):
            # One scalar query per place, because planners turn a join into a scan.
            sql, parameters = values(part)
            one = (
                f"SELECT b.id FROM {table} AS b WHERE b.run_id = %s AND {owner} AND"  # noqa: S608
                ' b.series = v.column2 AND b.level = v.column3 AND b."index" = v.column4'
            )
            ids = f"SELECT ({one}) FROM ({sql}) AS v"  # noqa: S608
            array = connection.vendor == "postgresql"  # which turns IN into a hash join
            among = f"= ANY(ARRAY({ids}))" if array else f"IN ({ids})"
            columns = 'replica_id, series, level, "index", id, count, data'
            with connection.cursor() as cursor:
                cursor.execute(
                    f"SELECT {columns} FROM {table} WHERE id {among}",  # noqa: S608
                    [run_id, *parameters],
                )
                for *place, pk, count, data in cursor.fetchall():
                    points = Points.unpack(bytes(data))
                    blocks[tuple(place)] = Block(pk=pk, count=count, points=points)
    return blocks


def save_blocks(run: Any, blocks: Mapping[Place, Block]) -> None:
    """Insert the new blocks, and update the others."""
    new, existing = [], []
    for place, block in blocks.items():
        data = block.points.pack()
        if block.pk is None:
            new.append((run, *place, block.count, data))
        else:
            existing.append((block.pk, (block.count, data)))
    update_rows(MetricBlock, ("count", "data"), existing)
    names = ("run", "replica", "series", "level", "index", "count", "data")
    insert_rows(MetricBlock, names, new)
