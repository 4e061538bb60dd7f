"""Requests of a round that wait for each other, counted under virtual time: computing and bytes
take none, every request the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.support.cuts import small_cuts
from bench.support.line import LineSpec
from bench.support.virtual_line import exchange, transfer_s
from diloco.exchange.upload import VERIFY_UPLOAD_BYTES
from diloco.protocol.reduce_cost import round_cost

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


def test_a_large_shard_is_stored_and_read_while_another_one_is_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = LineSpec(latency_s=LATENCY_S, connection=0.1e6, total=1e6)
    numel, part_bytes = 400_000, 32_768
    monkeypatch.setenv(VERIFY_UPLOAD_BYTES, str(part_bytes))  # a small share, as of a large payload

    def seconds(name: str) -> float:
        exchanged = exchange(
            line, tmp_path / name, replicas=2, plan="sharded", numel=numel, rounds=2, warm=8
        )
        return min(exchanged.seconds)  # while the parts in flight adapt, some rounds are slower

    with small_cuts(part_bytes=part_bytes):
        cost = round_cost(numel=numel, codec="fp32", replicas=2, mode="sharded")
        raw_s = transfer_s(line, up=cost.up, down=cost.down, part_bytes=part_bytes)
        in_two = seconds("two")
        monkeypatch.setattr("diloco.protocol.reduce_cost.LARGE_SHARD_PARTS", numel)
        in_one = seconds("one")
    assert in_two < 0.95 * in_one
    assert raw_s / in_two > 0.9
