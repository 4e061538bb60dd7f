"""A replica that becomes late in a steady group, in virtual time."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import pytest

from diloco.protocol import keys
from diloco.protocol.records import ContributionRecord
from diloco.store.multipart import Data
from tests.diloco.model.faulty_bucket import FaultyView
from tests.diloco.model.oracle import Log
from tests.diloco.model.test_scenarios import make_harness, run

H = 3
LATE = 3


def lose(monkeypatch: pytest.MonkeyPatch, rounds: Collection[int]) -> None:
    """Let the contributions of replica 3 to ``rounds`` arrive without tokens, so that it is late
    without any wait."""
    put = FaultyView.put

    def lossy(view: FaultyView, key: str, data: Data) -> None:
        parsed = keys.parse_contribution_record(key)
        if parsed and parsed[0] in rounds and parsed[1] == LATE:
            record = ContributionRecord.from_bytes(bytes(data))
            data = dataclasses.replace(record, tokens=0).to_bytes()
        put(view, key, data)

    monkeypatch.setattr(FaultyView, "put", lossy)


def returned(monkeypatch: pytest.MonkeyPatch, lost: range, **settings: float | str) -> list[float]:
    """Return the share of each inner step in the first contribution of replica 3 after the lost
    ones, sorted."""
    lose(monkeypatch, lost)
    harness = make_harness(
        replicas=4, min_quorum=1, sync_every=H, total_rounds=lost.stop, **settings
    )
    run(harness)
    log = Log(harness.bucket.written, harness.settings.to_dict())
    log.replay()
    [vector] = [v for r, name, _, v in log.taken if r == lost.stop and name.startswith("00003.")]
    return sorted(round(float(-share), 3) for share in vector if share)


@pytest.mark.parametrize("plan", ["gather", "sharded"])
def test_a_replica_that_is_away_keeps_all_its_progress(
    monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    assert returned(monkeypatch, range(2, 6), reduce_plan=plan) == [1.0] * 5 * H


def test_in_a_group_that_is_not_steady_a_late_replica_keeps_a_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = returned(monkeypatch, range(1, 4))
    assert shares == [0.25] * 2 * H + [0.5] * H + [1.0] * H


def test_a_replica_that_stays_away_for_long_keeps_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = returned(monkeypatch, range(2, 12))
    assert shares == [0.25] * 9 * H + [0.5] * H + [1.0] * H


@pytest.mark.parametrize("overlap", [1, 2])
def test_with_overlap_a_replica_that_is_away_keeps_all_its_progress(
    monkeypatch: pytest.MonkeyPatch, overlap: int
) -> None:
    shares = returned(monkeypatch, range(2, 6), overlap_steps=overlap, mixing_alpha=1.0)
    assert shares == [1.0] * len(shares) and len(shares) >= 4 * H
