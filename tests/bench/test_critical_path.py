"""Requests of a round that wait for each other, counted under virtual time: computing and bytes
take none, every request the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.support.line import LineSpec
from bench.support.virtual_line import exchange

LATENCY_S = 0.06
LINE = LineSpec(latency_s=LATENCY_S, connection=1e15, total=1e15)


def lengths(root: Path, plan: str, replicas: int) -> list[float]:
    """Return the duration of rounds in requests, with the pauses between polls."""
    exchanged = exchange(LINE, root, replicas=replicas, plan=plan, numel=5000, rounds=2, warm=4)
    return [seconds / LATENCY_S for seconds in exchanged.seconds]


@pytest.mark.parametrize(
    ("plan", "replicas", "most"),
    [
        # Payload, record, listing, its records, plan, commit; a follower polls twice.
        ("gather", 8, 8.5),
        # Also the own shard, the listing of shards, and the others' shards.
        ("sharded", 2, 13.5),
    ],
)
def test_few_requests_of_a_round_wait_for_each_other(
    tmp_path: Path, plan: str, replicas: int, most: float
) -> None:
    found = lengths(tmp_path, plan, replicas)
    assert max(found) <= most, found
