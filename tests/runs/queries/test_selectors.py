"""Permissions of roles, and rows with a constant number of queries."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, Group, User

from runs import permissions
from runs.models import Replica, Round, Run
from runs.queries import selectors
from tests.browser import seed
from tests.runs import run_harness as w

pytestmark = pytest.mark.django_db

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
def operator_user() -> Any:
    return w.person("olga", "operator")


def run_of(owner: Any, **options: Any) -> Any:
    made = seed.run(owner, **options)
    return selectors.runs_for(owner).get(pk=made.pk)


# Roles.


def test_the_migrations_made_the_roles() -> None:
    for role in ("viewer", "operator", "admin"):
        codenames = Group.objects.get(name=role).permissions.values_list("codename", flat=True)
        assert "view_run" in codenames
        assert all(name.startswith("view_") for name in codenames)


@pytest.mark.parametrize(
    ("kind", "sees", "submits", "operates"),
    [
        ("anonymous", False, False, False),
        ("no role", False, False, False),
        ("viewer", True, False, False),
        ("stranger", True, True, False),
        ("owner", True, True, True),
        ("admin", True, True, True),
        ("superuser", True, True, True),
        ("owner without a role", False, False, False),
        ("inactive owner", False, False, False),
    ],
)
def test_permissions_of_roles(
    operator_user: Any, kind: str, sees: bool, submits: bool, operates: bool
) -> None:
    run = seed.run(operator_user, committed=0)
    user: Any = {
        "anonymous": AnonymousUser,
        "no role": lambda: w.person("no role"),
        "viewer": lambda: w.person("vera", "viewer"),
        "stranger": lambda: w.person("oscar", "operator"),
        "owner": lambda: operator_user,
        "admin": lambda: w.person("ada", "admin"),
        "superuser": lambda: w.person("root", superuser=True),
        "owner without a role": lambda: (operator_user.groups.clear(), operator_user)[1],
        "inactive owner": lambda: (User.objects.update(is_active=False), User.objects.get())[1],
    }[kind]()
    assert selectors.runs_for(user).filter(pk=run.pk).exists() == sees
    assert permissions.can_submit(user) == submits
    assert permissions.can_operate(user, run) == operates


def test_runs_come_newest_first(operator_user: Any) -> None:
    made = [seed.run(operator_user, age_s=100 * (i % 5), committed=0) for i in range(10)]
    newest_first = sorted(made, key=lambda run: run.created_at, reverse=True)
    assert list(selectors.runs_for(operator_user)) == newest_first


# Cost.


@pytest.mark.parametrize("size", [1, 20])
def test_number_of_queries_of_a_page_does_not_grow(
    operator_user: Any, size: int, django_assert_num_queries: Any
) -> None:
    run = run_of(operator_user, replicas=size, committed=size, sync_every=5)
    with django_assert_num_queries(0):
        selectors.run_header(run)
    for query, cost in (
        (selectors.replica_rows, 3),
        (selectors.pool_rows, 3),
        (selectors.round_rows, 2),
        (selectors.event_rows, 1),
        (selectors.series_of, 1),
        (selectors.all_points, 4),
        (selectors.snapshot, 14),
    ):
        with django_assert_num_queries(cost):
            assert query(run)
    with django_assert_num_queries(3):
        selectors.points(run, "loss", replica=0)


@pytest.mark.parametrize("count", [1, 20])
def test_number_of_queries_of_the_list_does_not_grow(
    operator_user: Any, count: int, django_assert_num_queries: Any
) -> None:
    for _ in range(count):
        seed.run(operator_user, committed=0, replicas=2)
    operator_user = User.objects.get(pk=operator_user.pk)
    with django_assert_num_queries(2):  # the role, the runs
        rows = [selectors.run_header(run) for run in selectors.runs_for(operator_user)]
    assert len(rows) == count


TICK_QUERIES = 26


@pytest.mark.parametrize("replicas", [2, 20])
def test_number_of_queries_of_an_idle_tick_does_not_grow(
    make_harness: Any, replicas: int, django_assert_num_queries: Any
) -> None:
    harness = make_harness(replicas=replicas)
    harness.start()
    harness.tick()
    with django_assert_num_queries(TICK_QUERIES):
        harness.tick()


# Rows.


def test_a_snapshot_is_json(operator_user: Any) -> None:
    run = run_of(operator_user)
    result = selectors.snapshot(run)
    assert set(result) == {"run", "pools", "replicas", "rounds", "events", "points"}
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["run"]["created_at"].endswith("Z")
    assert len(result["replicas"]) == 4


def test_nonfinite_numbers_are_null(operator_user: Any) -> None:
    run = seed.run(operator_user)
    Replica.objects.filter(run=run).update(loss=None)
    Run.objects.filter(pk=run.pk).update(train_loss=float("inf"))
    Round.objects.filter(run=run).update(loss=float("-inf"))
    result = selectors.snapshot(Run.objects.get(pk=run.pk))
    json.dumps(result, allow_nan=False)
    assert result["run"]["train_loss"] is None
    assert result["rounds"][0]["loss"] is None


def test_header_counts_live_replicas(operator_user: Any) -> None:
    run = seed.run(operator_user, replicas=4)
    Replica.objects.filter(run=run, number=1).update(state="suspect")
    Replica.objects.filter(run=run, number=2).update(state="draining")
    header = selectors.run_header(selectors.runs_for(operator_user).get())
    assert (header["live"], header["target"], header["quorum"]) == (3, 4, 1)
    assert selectors.run_header(Run.objects.get())["live"] == 3


@pytest.mark.parametrize(
    ("change", "eta_s"),
    [
        ({}, 80.0),
        ({"round_s": None}, None),
        ({"committed_rounds": 99}, 0.0),
        ({"max_tokens": 13_000}, 30.0),  # 1,000 per round: three more rounds instead of eight
        ({"max_tokens": 5_000}, 0.0),
        ({"max_tokens": 10**9}, 80.0),
        ({"time_limit_s": 10**6}, 80.0),
        ({"time_limit_s": 60, "started_at": LONG_AGO}, 0.0),
        ({"time_limit_s": 60, "started_at": LONG_AGO, "idle_s": 1e9}, 80.0),
        ({"state": "succeeded"}, None),
        ({"state": "stopping"}, None),
        ({"state": "degraded"}, 80.0),
        ({"state": "stalled"}, None),  # no round is committed
    ],
)
def test_estimated_remaining_time(
    operator_user: Any, change: dict[str, Any], eta_s: float | None
) -> None:
    run = seed.run(operator_user, total_rounds=20, committed=12)
    fields = {"round_s": 10.0, "committed_rounds": 12, "tokens": 12_000, **change}
    limit = fields.pop("max_tokens", 0)
    if limit:
        fields["tokens"], fields["committed_rounds"] = 10_000, 10
        fields["round_s"] = 10.0 if limit < 10**9 else 8.0
    run.group_settings["max_tokens"] = limit
    Run.objects.filter(pk=run.pk).update(group_settings=run.group_settings, **fields)
    assert selectors.run_header(Run.objects.get())["eta_s"] == eta_s


def test_goodput() -> None:
    assert selectors.goodput({}) is None
    assert selectors.goodput({"compute": 3.0, "wait": 1.0}) == 0.75
    assert selectors.goodput({"wait": 1.0}) == 0.0


def test_rounds_by_number(operator_user: Any) -> None:
    run = run_of(operator_user, committed=6)
    assert [r["number"] for r in selectors.round_rows(run, numbers=[2, 6])] == [2, 6]


def test_the_newest_rounds_are_returned(
    operator_user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selectors, "ROUNDS_LIMIT", 3)
    run = run_of(operator_user, committed=6)
    assert [r["number"] for r in selectors.round_rows(run)] == [5, 6, 7]


def test_events_come_newest_first_and_after_an_id(operator_user: Any) -> None:
    run = run_of(operator_user)
    rows = selectors.event_rows(run)
    assert [e["id"] for e in rows] == sorted((e["id"] for e in rows), reverse=True)
    assert rows[-1]["actor"] == "olga"
    assert selectors.event_rows(run, after_id=rows[2]["id"]) == rows[:2]
    assert selectors.event_rows(run, limit=1) == rows[:1]


def test_points_after_a_step_are_downsampled(operator_user: Any) -> None:
    run = run_of(operator_user, committed=12, sync_every=100)
    whole = selectors.points(run, "loss", replica=1)
    assert whole["total"] == len(whole["step"]) == 1211
    later = selectors.points(run, "loss", replica=1, after_step=1200)
    assert later["step"] == whole["step"][1200:]
    few = selectors.points(run, "loss", replica=1, max_points=50)
    assert len(few["step"]) <= 50
    assert few["total"] == 1211
    assert selectors.points(run, "loss")["total"] == 0  # not a series of the run
    assert selectors.points(run, "eval_loss")["round"] == list(range(13))
    assert selectors.series_of(run)[:2] == [("cosine", None), ("cosine_high", None)]
