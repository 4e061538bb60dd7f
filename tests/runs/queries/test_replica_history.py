"""History of a replica: rounds with reasons, phases, and the last traceback."""

from __future__ import annotations

from typing import Any

import pytest

from runs.models import Contribution, LogLine, ReplicaAttempt, Round
from runs.queries import replica_history
from runs.queries.replica_history import (
    bandwidth,
    console_url,
    last_traceback,
    phase_strip,
    round_history,
    tally,
)
from tests.browser import seed, seed_fleet, seed_rounds, seed_usage

pytestmark = pytest.mark.django_db


@pytest.fixture
def replica() -> Any:
    run = seed.run(seed.user("olga", "operator"), committed=12, replicas=4)
    return run.replicas.get(number=1)


def by_round(replica: Any) -> dict[int, Any]:
    return {row["number"]: row for row in round_history(replica)}


def test_each_round_has_outcome_and_reason(replica: Any) -> None:
    contributions = Contribution.objects.filter(replica=replica)
    contributions.filter(round__number=3).update(state="late", reason="")
    contributions.filter(round__number=4).update(state="refused", reason="norm 812 is an outlier")
    contributions.filter(round__number=6).delete()
    rows = by_round(replica)
    assert max(rows) == 13 and list(rows) == sorted(rows, reverse=True)
    assert (rows[3]["outcome"], rows[3]["why"]) == ("late", "committed without it")
    assert (rows[4]["outcome"], rows[4]["why"]) == ("refused", "norm 812 is an outlier")
    assert (rows[6]["outcome"], rows[6]["why"]) == (
        "missing",
        "no upload reached the bucket in time",
    )
    assert rows[6]["bytes_up"] is None
    assert rows[2]["outcome"] == "included"
    result = tally(replica)
    assert (result["late"] >= 1, result["refused"] >= 1) == (True, True)
    assert result["without"] >= 1


def test_healing_and_late_rounds(replica: Any) -> None:
    seed_rounds.late_and_healing(replica.run, late=(9, 1), healing=((6, 1),))
    Contribution.objects.filter(replica=replica, round__number=9).update(state="late", reason="")
    rows = by_round(replica)
    assert (rows[6]["outcome"], rows[6]["icon"], rows[6]["why"]) == (
        "healing",
        "syncing",
        "it was catching up with the group",
    )
    assert (rows[9]["outcome"], rows[9]["late_s"]) == ("late", 2.4)
    assert rows[2]["late_s"] is None


def test_bandwidth_is_bytes_per_second_of_transfer(replica: Any) -> None:
    contributions = Contribution.objects.filter(replica=replica)
    contributions.update(bytes_up=0, phases={"compute": 6.0})
    assert bandwidth(round_history(replica), "up") is None
    contributions.filter(round__number=1).update(bytes_up=100, phases={"upload": 2.0})
    contributions.filter(round__number=2).update(bytes_up=500, phases={"upload": 4.0})
    assert bandwidth(round_history(replica), "up") == pytest.approx(100)
    assert by_round(replica)[1]["up_per_s"] == 50


def test_strip_has_consecutive_phases(replica: Any) -> None:
    strip = phase_strip(round_history(replica))
    assert strip is not None
    last = strip["bars"][-1]
    assert float(last["x"]) + float(last["width"]) == pytest.approx(1000, abs=0.1)
    assert sum(one["share"] for one in strip["shares"]) == pytest.approx(1)
    places = [float(bar["x"]) for bar in strip["bars"]]
    assert places == sorted(places)
    Contribution.objects.all().delete()
    assert phase_strip(round_history(replica)) is None


def test_newest_traceback_of_telemetry_or_backend(replica: Any) -> None:
    assert last_traceback(replica) is None
    now = replica.run.created_at
    seed_fleet.attempts(replica, backend="modal", price=1.0, earlier=3, now=now)
    found = last_traceback(replica)
    assert found is not None and found["source"] == "the backend, attempt 3"
    seed_usage.add_traceback(replica.run, 1)
    other = LogLine.objects.create(
        replica=replica, incarnation="x", at=now, level="INFO", message="went on"
    )
    result = last_traceback(replica)
    assert result is not None and result["text"] == seed_usage.TRACEBACK
    assert other.message not in result["text"]


def test_traceback_is_searched_in_the_newest_lines_only(
    replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed_usage.add_traceback(replica.run, 1)
    lines = LogLine.objects.filter(replica=replica).order_by("id")
    after = lines.filter(pk__gte=lines.get(message=seed_usage.TRACEBACK).pk).count()
    monkeypatch.setattr(replica_history, "LINES", after)
    assert last_traceback(replica) is not None
    monkeypatch.setattr(replica_history, "LINES", after - 1)
    assert last_traceback(replica) is None


@pytest.mark.parametrize(
    ("handle", "expected"),
    [
        (None, ""),
        ({"backend": "local", "data": {}}, ""),
        ({"backend": "kubernetes", "data": {"name": "x", "namespace": "y"}}, ""),
        ({"backend": "modal", "data": {"id": "sb-1"}}, "https://modal.com/id/sb-1"),
        ({"backend": "modal", "data": {}}, ""),
        (
            {"backend": "huggingface", "data": {"namespace": "a/../b", "job_id": "9"}},
            "https://huggingface.co/jobs/a%2F..%2Fb/9",
        ),
    ],
)
def test_console_url(handle: Any, expected: str) -> None:
    assert console_url(handle) == expected


def test_number_of_queries_is_constant(replica: Any, django_assert_num_queries: Any) -> None:
    for number in range(20, 90):
        Round.objects.create(run=replica.run, number=number)
    with django_assert_num_queries(2):
        assert len(round_history(replica)) == 50
    assert not ReplicaAttempt.objects.exists()
