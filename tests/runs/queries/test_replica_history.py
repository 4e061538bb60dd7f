"""What one replica gave to rounds, why it is not in others, and what it said when it broke."""

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


def test_each_round_says_what_came_of_it_and_why(replica: Any) -> None:
    mine = Contribution.objects.filter(replica=replica)
    mine.filter(round__number=3).update(state="late", reason="")
    mine.filter(round__number=4).update(state="refused", reason="norm 812 is an outlier")
    mine.filter(round__number=6).delete()
    rows = by_round(replica)
    assert max(rows) == 13 and list(rows) == sorted(rows, reverse=True)
    assert (rows[3]["outcome"], rows[3]["why"]) == ("late", "committed without it")
    assert (rows[4]["outcome"], rows[4]["why"]) == ("refused", "norm 812 is an outlier")
    assert (rows[6]["outcome"], rows[6]["why"]) == (
        "missing", "nothing of it reached the bucket in time",
    )  # fmt: skip
    assert rows[6]["bytes_up"] is None
    assert rows[2]["outcome"] == "included"
    found = tally(replica)
    assert (found["late"] >= 1, found["refused"] >= 1) == (True, True)
    assert found["without"] >= 1


def test_a_round_it_healed_in_and_one_it_was_late_for(replica: Any) -> None:
    seed_rounds.late_and_healing(replica.run, late=(9, 1), healing=((6, 1),))
    Contribution.objects.filter(replica=replica, round__number=9).update(state="late", reason="")
    rows = by_round(replica)
    assert (rows[6]["outcome"], rows[6]["icon"], rows[6]["why"]) == (
        "healing", "syncing", "it was catching up with the group",
    )  # fmt: skip
    assert (rows[9]["outcome"], rows[9]["late_s"]) == ("late", 2.4)
    assert rows[2]["late_s"] is None


def test_bandwidth_is_bytes_over_the_seconds_in_which_they_were_moved(replica: Any) -> None:
    mine = Contribution.objects.filter(replica=replica)
    mine.update(bytes_up=0, phases={"compute": 6.0})
    assert bandwidth(round_history(replica), "up") is None
    mine.filter(round__number=1).update(bytes_up=100, phases={"upload": 2.0})
    mine.filter(round__number=2).update(bytes_up=500, phases={"upload": 4.0})
    assert bandwidth(round_history(replica), "up") == pytest.approx(100)
    assert by_round(replica)[1]["up_per_s"] == 50


def test_the_strip_is_the_phases_one_after_another(replica: Any) -> None:
    strip = phase_strip(round_history(replica))
    assert strip is not None
    last = strip["bars"][-1]
    assert float(last["x"]) + float(last["width"]) == pytest.approx(1000, abs=0.1)
    assert sum(one["share"] for one in strip["shares"]) == pytest.approx(1)
    places = [float(bar["x"]) for bar in strip["bars"]]
    assert places == sorted(places)
    Contribution.objects.all().delete()
    assert phase_strip(round_history(replica)) is None


def test_the_newest_traceback_of_its_own_or_of_the_backend(replica: Any) -> None:
    assert last_traceback(replica) is None
    now = replica.run.created_at
    seed_fleet.attempts(replica, backend="modal", price=1.0, earlier=3, now=now)
    found = last_traceback(replica)
    assert found is not None and found["whence"] == "the backend, of attempt 3"
    seed_usage.broke(replica.run, 1)
    other = LogLine.objects.create(
        replica=replica, incarnation="x", at=now, level="INFO", message="went on"
    )
    found = last_traceback(replica)
    assert found is not None and found["text"] == seed_usage.TRACEBACK
    assert other.message not in found["text"]


def test_a_traceback_is_looked_for_in_the_newest_lines_alone(
    replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed_usage.broke(replica.run, 1)
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
def test_where_a_person_finds_the_job(handle: Any, expected: str) -> None:
    assert console_url(handle) == expected


def test_it_costs_the_same_with_many_rounds(replica: Any, django_assert_num_queries: Any) -> None:
    for number in range(20, 90):
        Round.objects.create(run=replica.run, number=number)
    with django_assert_num_queries(2):
        assert len(round_history(replica)) == 50
    assert not ReplicaAttempt.objects.exists()
