"""Runs beside each other: measures, differences, curves by tokens, time and money."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from runs.models import ReplicaPool, Round, Run
from runs.queries import comparison, selectors
from runs.queries.comparison import MEASURES, _Job, spent_at
from tests.browser import seed
from tests.browser.seed_prices import priced

pytestmark = pytest.mark.django_db


@pytest.fixture
def olga() -> Any:
    return seed.user("olga", "operator")


def seen(*runs: Run) -> list[Run]:
    by_id = {
        r.pk: r for r in selectors.with_header(Run.objects.filter(pk__in=[r.pk for r in runs]))
    }
    return [by_id[r.pk] for r in runs]


def named(run: Run) -> dict[str, Any]:
    return comparison.measured(seen(run))[0]


def test_measures_of_a_run(olga: Any) -> None:
    run = seed.run(olga, state="succeeded", committed=4, replicas=2)
    priced(run, 3.6)
    Run.objects.filter(pk=run.pk).update(cost_usd=2.0, tokens=4_000_000, eval_loss=2.5)
    Round.objects.filter(run=run, number=3).update(eval_loss=2.25, loss=2.125)
    found = named(run)
    wall_s = (run.ended_at - run.first_step_at).total_seconds()
    assert found["eval_loss"] == 2.5
    assert found["best_eval_loss"] == 2.25
    assert found["best_train_loss"] == 2.125
    assert found["wall_s"] == wall_s
    assert found["tokens_per_s"] == 4_000_000 / wall_s
    assert found["usd_per_billion_tokens"] == 500.0
    assert found["bytes"] == run.bytes_up + run.bytes_down


def test_what_is_not_known_is_none_and_never_zero(olga: Any) -> None:
    run = seed.run(olga, state="provisioning", committed=0, replicas=2)
    found = named(run)
    for name in ("eval_loss", "best_eval_loss", "train_loss", "wall_s", "tokens_per_s", "goodput",
                 "cost_usd", "usd_per_billion_tokens"):  # fmt: skip
        assert found[name] is None, name


def test_differences_are_to_the_first_and_say_which_is_better() -> None:
    base = {m.name: 10.0 for m in MEASURES}
    other = {m.name: 12.0 for m in MEASURES} | {"eval_loss": 9.0, "goodput": None}
    first, second = comparison.table([base, other])
    assert all(cell.change is None for cell in first)
    cells = dict(zip([m.name for m in MEASURES], second, strict=True))
    assert (cells["eval_loss"].change, cells["eval_loss"].share) == (-1.0, -0.1)
    assert cells["eval_loss"].good is True
    assert cells["wall_s"].good is False
    assert cells["tokens_per_s"].good is True
    assert cells["tokens"].good is None
    assert cells["goodput"].change is None


def test_a_baseline_of_zero_has_no_share() -> None:
    base = {m.name: 0.0 for m in MEASURES}
    _, second = comparison.table([base, {m.name: 1.0 for m in MEASURES}])
    assert all(cell.share is None and cell.change == 1.0 for cell in second)


def test_only_settings_that_differ(olga: Any) -> None:
    one = seed.run(olga, committed=0, sync_every=40, replicas=2)
    two = seed.run(olga, committed=0, sync_every=80, replicas=2)
    Run.objects.filter(pk=two.pk).update(workload=two.workload | {"size": "mini"})
    found = {d.name: d for d in comparison.differences(seen(one, two, one))}
    assert set(found) == {"settings.sync_every", "workload.size"}
    assert found["settings.sync_every"].values == (40, 80, 40)
    assert found["settings.sync_every"].same == (True, False, True)
    assert found["settings.sync_every"].label == "Local steps (H)"
    ReplicaPool.objects.filter(run=two).update(backend="modal", hardware="H100", spot=True)
    found = {d.name: d for d in comparison.differences(seen(one, two))}
    assert found["pools"].values == ("2 × local cpu", "2 × modal H100 spot")


def test_a_setting_an_older_run_does_not_know_differs(olga: Any) -> None:
    one, two = (seed.run(olga, committed=0, replicas=2) for _ in range(2))
    settings = dict(two.group_settings)
    del settings["codec"]
    Run.objects.filter(pk=two.pk).update(group_settings=settings)
    (found,) = comparison.differences(seen(one, two))
    assert (found.name, found.values) == ("settings.codec", ("fp32", None))


def test_curves_by_tokens_time_and_money(olga: Any) -> None:
    run = priced(seed.run(olga, state="succeeded", committed=6, replicas=2), 3.6)
    found = {c.series: c for c in comparison.curves(seen(run))}
    assert set(found) == {"eval_loss", "loss"}
    assert len(found["eval_loss"].value) == 7  # and of the untrained model
    train = found["loss"]
    assert train.tokens.tolist() == sorted(train.tokens.tolist())
    assert train.wall_s[0] >= 0
    # Two replicas at 3.6 dollars an hour: 2 thousandths of a dollar each second.
    assert train.usd is not None
    assert train.usd == pytest.approx(train.wall_s * 0.002)


def test_a_run_with_an_unknown_price_has_no_money_axis(olga: Any) -> None:
    run = seed.run(olga, committed=3, replicas=2)
    assert all(c.usd is None for c in comparison.curves(seen(run)))


def test_jobs_cost_between_their_ends_only() -> None:
    jobs = [
        _Job(began=100, ended=200, usd_h=36.0),
        _Job(began=150, ended=float("inf"), usd_h=72.0),
    ]
    at = np.array([0.0, 100.0, 150.0, 250.0])
    assert spent_at(jobs, at).tolist() == [0.0, 0.0, 0.5, 3.0]


def test_a_long_curve_is_thinned_and_keeps_its_extremes(olga: Any) -> None:
    run = seed.run(olga, committed=1, replicas=1)
    now = run.first_step_at
    Round.objects.filter(run=run).delete()
    Round.objects.bulk_create(
        Round(
            run=run, number=n, state="committed", tokens_total=n * 10,
            loss=9.0 if n == 777 else 3.0,
            committed_at=now + datetime.timedelta(seconds=n),
        )
        for n in range(1, 4001)
    )  # fmt: skip
    (train,) = (c for c in comparison.curves(seen(run)) if c.series == "loss")
    assert train.total == 4000
    assert len(train.value) <= comparison.CURVE_POINTS
    assert train.value.max() == 9.0
    assert train.tokens[-1] == 40_000


def test_curves_do_not_depend_on_how_many_rows_are_read_at_once(
    olga: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [seed.run(olga, committed=count, replicas=2, seed=count) for count in (3, 7, 4)]

    def told() -> list[Any]:
        return [
            (c.run, c.series, c.total, c.tokens.tolist(), c.value.tolist())
            for c in comparison.curves(seen(*runs))
        ]

    whole, longest, thin = told(), [], comparison._thin
    monkeypatch.setattr(comparison, "ROWS", 2)
    monkeypatch.setattr(comparison, "BLOCKS", 1)

    def measured(parts: Any) -> Any:
        longest.append(sum(map(len, parts)))
        return thin(parts)

    monkeypatch.setattr(comparison, "_thin", measured)
    assert told() == whole
    assert sorted(longest) == [3, 4, 4, 5, 7, 8]  # one run's at a time, and one series'


def test_the_number_of_queries_does_not_grow(olga: Any) -> None:
    def asked(count: int) -> int:
        runs = [priced(seed.run(olga, committed=3, replicas=2), 1.0) for _ in range(count)]
        found = seen(*runs)
        with CaptureQueriesContext(connection) as queries:
            comparison.measured(found)
            comparison.curves(found)
        return len(queries)

    assert asked(1) == asked(6)
