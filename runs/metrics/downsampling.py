"""Store points and update the downsampled levels above them, in one transaction.

Changed points update their buckets on the first level, and these update the second. This takes a
few rows per series, whatever its length. The rows are the same whether points arrive one by one,
together, twice or late. ``count`` of a downsampled block is the number of points below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from runs.metrics.block_store import Block, Owner, Place, read_blocks, save_blocks
from runs.metrics.blocks import LEVELS, Key, Points, keep, merge, put_range, split, width


def add_points(run: Any, replica: Any, new: Mapping[str, Points], *, key: Key) -> dict[str, Points]:
    """Merge points into the blocks of their series.

    ``run`` and ``replica`` (None for series of the run) are rows or their primary keys. Returns the
    newest block of each series.
    """
    owner = _id(replica)
    return add_of_many(run, {owner: new}, key=key)[owner]


def add_of_many(
    run: Any, new: Mapping[Owner, Mapping[str, Points]], *, key: Key
) -> dict[Owner, dict[str, Points]]:
    """Like :func:`add_points` for several replicas, by primary key, in the same few statements."""
    parts = {
        (owner, series, 0, index): part
        for owner, by_series in new.items()
        for series, points in by_series.items()
        for index, part in split(points, key)
    }
    blocks = read_blocks(_id(run), {*parts, *(above for place in parts for above in _above(place))})
    newest: dict[Owner, dict[str, Points]] = {owner: {} for owner in new}
    for place, part in sorted(parts.items(), key=lambda item: item[0][3]):
        owner, series, _, _ = place
        block = blocks[place]
        block.points = newest[owner][series] = merge(block.points, part, key)
        more = len(block.points) - block.count
        block.count += more
        _roll_up(block.points, part, [blocks[above] for above in _above(place)], more, key)
    save_blocks(_id(run), blocks)
    return newest


def _id(row: Any) -> Any:
    return getattr(row, "pk", row)


def _above(place: Place) -> list[Place]:
    """The block of each level that contains the keys of a block of points."""
    owner, series, _, index = place
    first = index * width(0)
    return [(owner, series, level, first // width(level)) for level in LEVELS]


def _roll_up(points: Points, changed: Points, above: Sequence[Block], more: int, key: Key) -> None:
    """Recompute the buckets of ``changed`` in the blocks above its block, which has ``more`` points
    than before.

    All keys of a bucket are in one block of the level below.
    """
    keys = getattr(changed, key)
    low, high = int(keys.min()), int(keys.max()) + 1
    for level, block in zip(LEVELS, above, strict=True):
        low, high = low >> level << level, -(-high >> level) << level
        part = slice(*np.searchsorted(getattr(points, key), (low, high)))
        kept = keep(points.take(part), key, level)
        block.points = points = put_range(block.points, kept, key, low, high)
        block.count += more
