"""Comparison of runs: measures, differences, and curves by tokens, time and cost."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from runs.metrics.blocks import Points
from runs.models import MetricBlock, ReplicaPool, Round, Run
from runs.queries import comparison, selectors
from runs.queries.comparison import MEASURES, _Job, spent_at
from tests.browser import seed
from tests.browser.seed_prices import priced, unpriced

pytestmark = pytest.mark.django_db


@pytest.fixture
def operator_user() -> Any:
    return seed.user("olga", "operator")


def with_headers(*runs: Run) -> list[Run]:
    by_id = {
        r.pk: r for r in selectors.with_header(Run.objects.filter(pk__in=[r.pk for r in runs]))
    }
    return [by_id[r.pk] for r in runs]


def named(run: Run) -> dict[str, Any]:
    return comparison.measured(with_headers(run))[0]


def test_measures_of_a_run(operator_user: Any) -> None:
    run = seed.run(operator_user, state="succeeded", committed=4, replicas=2)
    priced(run, 3.6)
    Run.objects.filter(pk=run.pk).update(cost_usd=2.0, tokens=4_000_000, eval_loss=2.5)
    Round.objects.filter(run=run, number=3).update(eval_loss=2.25, loss=2.125)
    result = named(run)
    wall_s = (run.ended_at - run.first_step_at).total_seconds()
    assert result["eval_loss"] == 2.5
    assert result["best_eval_loss"] == 2.25
    assert result["best_train_loss"] == 2.125
    assert result["wall_s"] == wall_s
    assert result["tokens_per_s"] == 4_000_000 / wall_s
    assert result["usd_per_billion_tokens"] == 500.0
    assert result["bytes"] == run.bytes_up + run.bytes_down


def test_unknown_values_are_none(operator_user: Any) -> None:
    run = unpriced(seed.run(operator_user, state="provisioning", committed=0, replicas=2))
    result = named(run)
    for name in (
        "eval_loss",
        "best_eval_loss",
        "train_loss",
        "tokens",
        "bytes",
        "wall_s",
        "tokens_per_s",
        "goodput",
        "cost_usd",
        "usd_per_billion_tokens",
    ):
        assert result[name] is None, name


def test_changes_are_relative_to_the_first_run() -> None:
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


def test_only_settings_that_differ(operator_user: Any) -> None:
    one = seed.run(operator_user, committed=0, sync_every=40, replicas=2)
    two = seed.run(operator_user, committed=0, sync_every=80, replicas=2)
    Run.objects.filter(pk=two.pk).update(workload=two.workload | {"size": "mini"})
    result = {d.name: d for d in comparison.differences(with_headers(one, two, one))}
    assert set(result) == {"settings.sync_every", "workload.size"}
    assert result["settings.sync_every"].values == (40, 80, 40)
    assert result["settings.sync_every"].same == (True, False, True)
    assert result["settings.sync_every"].label == "Local steps (H)"
    ReplicaPool.objects.filter(run=two).update(backend="modal", hardware="H100", spot=True)
    result = {d.name: d for d in comparison.differences(with_headers(one, two))}
    assert result["pools"].values == ("2 × local cpu", "2 × modal H100 spot")


def test_setting_missing_in_an_older_run_differs(operator_user: Any) -> None:
    one, two = (seed.run(operator_user, committed=0, replicas=2) for _ in range(2))
    settings = dict(two.group_settings)
    del settings["codec"]
    Run.objects.filter(pk=two.pk).update(group_settings=settings)
    (result,) = comparison.differences(with_headers(one, two))
    assert (result.name, result.values) == ("settings.codec", ("fp32", None))


def test_curves_by_tokens_time_and_money(operator_user: Any) -> None:
    run = priced(seed.run(operator_user, state="succeeded", committed=6, replicas=2), 3.6)
    result = {c.series: c for c in comparison.curves(with_headers(run))}
    assert set(result) == {"eval_loss", "loss"}
    assert len(result["eval_loss"].value) == 7  # including the untrained model
    train = result["loss"]
    assert train.tokens.tolist() == sorted(train.tokens.tolist())
    assert train.wall_s[0] >= 0
    # Two replicas at 3.6 dollars an hour: 2 thousandths of a dollar each second.
    assert train.usd is not None
    assert train.usd == pytest.approx(train.wall_s * 0.002)


def test_curves_of_every_metric(operator_user: Any) -> None:
    run = seed.run(operator_user, committed=6, replicas=2)
    found = {c.series: c for c in comparison.curves(with_headers(run), tuple(comparison.METRICS))}
    assert list(found) == list(comparison.METRICS)
    for series, curve in found.items():
        assert 6 <= len(curve.value) <= 7, series
        assert np.isfinite(curve.value).all()
        assert curve.tokens.tolist() == sorted(curve.tokens.tolist())
    of_round = MetricBlock.objects.filter(run=run, replica=None, series__startswith="phase_")
    seconds = {b.series: Points.unpack(bytes(b.data)).value for b in of_round.filter(level=0)}
    assert found["goodput"].value == pytest.approx(seconds["phase_compute"] / sum(seconds.values()))
    of_round.filter(series="phase_compute").delete()
    assert comparison.curves(with_headers(run), ["goodput"]) == []


def test_a_run_with_an_unknown_price_has_no_money_axis(operator_user: Any) -> None:
    run = unpriced(seed.run(operator_user, committed=3, replicas=2))
    assert all(c.usd is None for c in comparison.curves(with_headers(run)))


def test_jobs_cost_between_their_ends_only() -> None:
    jobs = [
        _Job(began=100, ended=200, usd_h=36.0),
        _Job(began=150, ended=float("inf"), usd_h=72.0),
    ]
    at = np.array([0.0, 100.0, 150.0, 250.0])
    assert spent_at(jobs, at).tolist() == [0.0, 0.0, 0.5, 3.0]


def test_a_long_curve_is_thinned_and_keeps_its_extremes(operator_user: Any) -> None:
    run = seed.run(operator_user, committed=1, replicas=1)
    now = run.first_step_at
    Round.objects.filter(run=run).delete()
    Round.objects.bulk_create(
        Round(
            run=run,
            number=n,
            state="committed",
            tokens_total=n * 10,
            loss=9.0 if n == 777 else 3.0,
            committed_at=now + datetime.timedelta(seconds=n),
        )
        for n in range(1, 4001)
    )
    (train,) = (c for c in comparison.curves(with_headers(run)) if c.series == "loss")
    assert train.total == 4000
    assert len(train.value) <= comparison.CURVE_POINTS
    assert train.value.max() == 9.0
    assert train.tokens[-1] == 40_000


def test_curves_do_not_depend_on_how_many_rows_are_read_at_once(
    operator_user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [seed.run(operator_user, committed=count, replicas=2, seed=count) for count in (3, 7, 4)]

    def all_curves() -> list[Any]:
        return [
            (c.run, c.series, c.total, c.tokens.tolist(), c.value.tolist())
            for c in comparison.curves(with_headers(*runs))
        ]

    whole, longest, thin = all_curves(), [], comparison._thin
    monkeypatch.setattr(comparison, "ROWS", 2)
    monkeypatch.setattr(comparison, "BLOCKS", 1)

    def measured(parts: Any) -> Any:
        longest.append(sum(map(len, parts)))
        return thin(parts)

    monkeypatch.setattr(comparison, "_thin", measured)
    assert all_curves() == whole
    assert sorted(longest) == [3, 4, 4, 5, 7, 8]  # one run and one series at a time


def test_the_number_of_queries_does_not_grow(operator_user: Any) -> None:
    def queries_of(count: int) -> int:
        runs = [priced(seed.run(operator_user, committed=3, replicas=2), 1.0) for _ in range(count)]
        result = with_headers(*runs)
        with CaptureQueriesContext(connection) as queries:
            comparison.measured(result)
            comparison.curves(result)
        return len(queries)

    assert queries_of(1) == queries_of(6)
