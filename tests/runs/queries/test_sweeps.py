"""Sweeps as rows: counts, ranking, and pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from archipelago import sweep_rows
from runs.models import Run, Sweep
from runs.queries import keyset, sweeps
from tests.browser import seed, seed_sweeps

pytestmark = pytest.mark.django_db


def test_the_best_value_is_first_and_runs_without_one_are_last(
    django_assert_max_num_queries: Any,
) -> None:
    owner = seed.user("olga", "operator")
    sweep = seed_sweeps.sweep(owner, [3.0, None, float("inf"), 2.0])
    found = sweeps.find(owner, sweep.pk)
    assert found is not None
    with django_assert_max_num_queries(6):
        ranked = sweeps.ranked(found, owner)
    assert [(row["rank"], row["run"]["name"]) for row in ranked["runs"]] == [
        (1, "Rates 3"),
        (2, "Rates 0"),
        (None, "Rates 1"),
        (None, "Rates 2"),
    ]
    assert [row["value"] for row in ranked["runs"]] == [2.0, 3.0, None, None]
    assert ranked["sweep"]["cost_usd"] == 6.0
    assert ranked["sweep"]["parameters"][0]["label"] == "Inner learning rate"


def test_a_metric_of_which_more_is_better_is_ranked_the_other_way() -> None:
    owner = seed.user("olga", "operator")
    sweep = seed_sweeps.sweep(owner, [1.0, 1.0])
    Run.objects.filter(name="Rates 1").update(phase_s={"compute": 9, "wait": 1})
    Run.objects.filter(name="Rates 0").update(phase_s={"compute": 1, "wait": 9})
    found = sweeps.find(owner, sweep.pk)
    assert found is not None
    ranked = sweeps.ranked(found, owner, "goodput")
    assert [row["run"]["name"] for row in ranked["runs"]] == ["Rates 1", "Rates 0"]
    assert sweeps.ranked(found, owner, "nothing")["metric"] == "eval_loss"


def test_rows_have_the_fields_of_their_types() -> None:
    owner = seed.user("olga", "operator")
    found = sweeps.find(owner, seed_sweeps.sweep(owner, [1.0]).pk)
    assert found is not None
    ranked = sweeps.ranked(found, owner)
    for kind, row in (
        (sweep_rows.RankedSweep, ranked),
        (sweep_rows.Sweep, ranked["sweep"]),
        (sweep_rows.SweepRun, ranked["runs"][0]),
        (sweep_rows.SweepParameter, ranked["sweep"]["parameters"][0]),
    ):
        assert set(row) == {field.name for field in dataclasses.fields(kind)}


def test_pages_follow_each_other_without_gap() -> None:
    owner = seed.user("olga", "operator")
    wanted = [seed_sweeps.sweep(owner, []).pk for _ in range(3)][::-1]
    every = sweeps.sweeps_for(owner)
    first, after = keyset.page(every, "created_at", before="", limit=2)
    rest, end = keyset.page(every, "created_at", before=after, limit=2)
    assert [sweep.pk for sweep in first + rest] == wanted
    assert end == ""
    for place in ("", "x", "2026_y", "1_1", after.replace("_", "")):
        assert len(keyset.page(every, "created_at", before=place, limit=3)[0]) == 3


def test_whatever_the_columns_hold_can_be_shown() -> None:
    owner = seed.user("olga", "operator")
    sweep = seed_sweeps.sweep(owner, [1.0])
    Sweep.objects.update(parameters={"a": [1]}, metric="nothing")
    Run.objects.update(sweep_values=[1])
    found = sweeps.find(owner, sweep.pk)
    assert found is not None
    ranked = sweeps.ranked(found, owner)
    assert ranked["sweep"]["parameters"] == []
    assert ranked["runs"][0]["values"] == {}


def test_a_user_without_a_role_sees_none() -> None:
    owner = seed.user("olga", "operator")
    sweep = seed_sweeps.sweep(owner, [1.0])
    assert sweeps.find(seed.user("no-role", ""), sweep.pk) is None
