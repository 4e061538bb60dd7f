"""Data of the charts: compact, small, for the requested window; and invalid parameters."""

from __future__ import annotations

import base64
import copy
import itertools
import math
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from django.test import Client
from django.urls import reverse

from runs.metrics import downsampling, round_strips, timeline
from runs.metrics.blocks import Points
from runs.models import Round, Run
from tests.browser import seed, seed_rounds
from tests.module_rows import Unblock

pytestmark = pytest.mark.django_db


@pytest.fixture(scope="module")
def seeded(module_rows: Unblock) -> Run:
    with module_rows():
        created: Run = seed.run(
            seed.user("olga", "operator"), committed=12, replicas=4, total_rounds=20, sync_every=60
        )
        return created


@pytest.fixture
def run(db: None, seeded: Run) -> Run:
    return copy.deepcopy(seeded)


@pytest.fixture
def client(run: Run) -> Client:
    client = Client()
    client.force_login(run.owner)
    return client


def ask(client: Client, run: Run, name: str = "run-series", **query: Any) -> Any:
    response = client.get(reverse(name, args=[run.pk]), query)
    assert response.status_code == 200, response.content
    return response.json()


def x_of(curve: Any) -> list[float]:
    return [v * curve["unit"] for v in itertools.accumulate(curve["x"])]


def test_curves_are_differences_and_a_band(client: Client, run: Run) -> None:
    body = ask(client, run, of="loss,eval_loss")
    assert [(c["series"], c["replica"]) for c in body["curves"]] == [
        ("eval_loss", None),
        *(("loss", n) for n in range(4)),
    ]
    loss = body["curves"][1]
    assert x_of(loss) == list(range(1, 732))
    assert (loss["total"], loss["level"], body["replicas"]) == (731, 0, 4)
    band = body["band"]
    at = x_of(band).index(300.0)
    values = [c["y"][299] for c in body["curves"][1:]]
    assert (band["low"][at], band["high"][at]) == (min(values), max(values))
    assert band["mean"][at] == pytest.approx(sum(values) / 4, rel=1e-5)


def test_each_axis_has_its_own_scale(client: Client, run: Run) -> None:
    raw = {c["replica"]: c for c in ask(client, run, of="loss", x="round")["curves"]}
    assert x_of(raw[2])[-1] == pytest.approx(731 / 60)
    tokens = ask(client, run, of="loss", x="tokens")["curves"][0]
    per_step = run.group_settings["batch_size"] * 128
    assert x_of(tokens)[-1] == 731 * per_step * 4
    wall = ask(client, run, of="loss", x="wall")["curves"][0]
    relative = ask(client, run, of="loss", x="relative")["curves"][0]
    assert run.first_step_at is not None
    has_started = run.first_step_at.timestamp()
    assert x_of(wall)[5] - has_started == pytest.approx(x_of(relative)[5], abs=2e-3)


@pytest.mark.parametrize("x", ["step", "round", "tokens", "wall", "relative"])
def test_the_window_applies_to_the_chosen_axis(client: Client, run: Run, x: str) -> None:
    whole = x_of(ask(client, run, of="loss", x=x)["curves"][0])
    low, high = whole[200], whole[400]
    result = ask(client, run, of="loss", x=x, **{"from": low, "to": high})["curves"][0]
    inside = [v for v in x_of(result) if low <= v <= high]
    assert len(inside) >= 199
    assert len(result["x"]) < 260


def test_a_long_curve_gives_a_small_response(client: Client, run: Run) -> None:
    steps = list(range(100_000))
    values = [3 + math.sin(s) for s in steps]
    values[54_321] = math.nan
    values[54_400] = 1e9
    points = Points.of(
        step=steps,
        round=[0] * len(steps),
        tokens=steps,
        wall_s=[1.7e9 + s for s in steps],
        value=values,
    )
    downsampling.add_points(run, run.replicas.get(number=0), {"grad_norm": points}, key="step")
    response = client.get(reverse("run-series", args=[run.pk]), {"of": "grad_norm", "x": "wall"})
    (curve,) = response.json()["curves"]
    assert curve["total"] == 100_000
    assert len(curve["x"]) <= 4000
    assert len(response.content) < 64_000
    assert 1e9 in curve["y"]
    assert [kind for _, kind in curve["odd"]] == ["nan"]
    assert x_of(curve)[curve["odd"][0][0]] == pytest.approx(1.7e9 + 54_321)


def test_many_replicas_are_a_band_plus_selected_ones(client: Client) -> None:
    run = seed.run(seed.user("olga", "operator"), committed=2, replicas=20, sync_every=20)
    body = ask(client, run, of="loss", replica="3,17")
    assert [c["replica"] for c in body["curves"]] == [3, 17]
    assert (body["replicas"], len(body["band"]["mean"])) == (20, 51)
    assert body["total"] == 20 * 51


@pytest.mark.parametrize(
    ("name", "query"),
    [
        ("run-series", {}),
        ("run-series", {"of": ",".join(f"s{i}" for i in range(13))}),
        ("run-series", {"of": "loss", "x": "phase-of-the-moon"}),
        ("run-series", {"of": "loss", "from": "nan"}),
        ("run-series", {"of": "loss", "to": "soon"}),
        ("run-series", {"of": "loss", "points": "0"}),
        ("run-series", {"of": "loss", "points": "9" * 40}),
        ("run-series", {"of": "loss", "points": "²"}),
        ("run-series", {"of": "loss", "replica": "1,x"}),
        ("run-heatmap", {"below": "-1"}),
        ("run-timeline", {"columns": "100000"}),
        ("run-timeline", {"from": "5", "to": "4"}),
        ("run-timeline", {"from": "inf"}),
        ("run-timeline", {"from": "1e300"}),
    ],
)
def test_invalid_parameters_get_an_error_message(
    client: Client, run: Run, name: str, query: dict[str, str]
) -> None:
    response = client.get(reverse(name, args=[run.pk]), query)
    assert response.status_code == 400
    assert b"expected" in response.content
    assert b"found" in response.content


def test_unusual_windows_are_accepted(client: Client, run: Run) -> None:
    for low, high in (("1e15", ""), ("-1e15", "-1e14"), ("500", "100")):
        for x in ("step", "tokens", "wall"):
            ask(client, run, of="loss,norm,none", x=x, **{"from": low, "to": high})
    ask(client, run, "run-timeline", **{"from": "-1e15", "to": "1e15"})
    nothing = seed.run(run.owner, committed=0)
    assert ask(client, nothing, of="loss")["curves"] == []
    assert ask(client, nothing, "run-heatmap")["outcomes"] == ""
    assert ask(client, nothing, "run-timeline")["bars"]["number"] == []


def test_the_heatmap_has_a_digit_per_round_and_replica(client: Client, run: Run) -> None:
    body = ask(client, run, "run-heatmap")
    assert list(itertools.accumulate(body["numbers"])) == list(range(1, 14))
    rows = [body["outcomes"][i : i + 4] for i in range(0, 52, 4)]
    named = [[body["names"][int(d)] for d in row] for row in rows]
    assert named[0] == ["included"] * 4
    assert named[4] == ["late", "refused", "late", "late"]
    assert named[7] == ["included", "included", "", "included"]
    assert named[12] == ["uploaded", "", "uploaded", ""]
    assert body["kinds"][int(body["states"][4])] == "void"
    assert list(itertools.accumulate(ask(client, run, "run-heatmap", below=3)["numbers"])) == [1, 2]


def test_the_heatmap_has_lateness_and_healing(client: Client, run: Run) -> None:
    assert ask(client, run, "run-heatmap")["late"] == []
    seed_rounds.late_and_healing(run)
    body = ask(client, run, "run-heatmap")
    places = list(itertools.accumulate(body["late"]))
    assert [(divmod(place, 4), s) for place, s in zip(places, body["late_ds"], strict=True)] == [
        ((8, 2), 24)
    ]
    rows = [body["outcomes"][i : i + 4] for i in range(0, 52, 4)]
    assert [body["names"][int(rows[i][3])] for i in (5, 6)] == ["healing", "healing"]
    response = client.get(reverse("run-round", args=[run.pk, 6])).json()["round"]
    assert (response["healing"], len(response["contributions"])) == ([3], 3)
    response = client.get(reverse("run-round", args=[run.pk, 9])).json()["round"]
    assert [c["late_s"] for c in response["contributions"]] == [None, None, 2.4, None]


def test_a_round_by_its_number(client: Client, run: Run) -> None:
    response = client.get(reverse("run-round", args=[run.pk, 5])).json()["round"]
    assert (response["number"], response["state"], len(response["contributions"])) == (5, "void", 4)
    for missing in (0, 99, 10**20):
        assert client.get(reverse("run-round", args=[run.pk, missing])).status_code == 404


def test_the_timeline_has_the_bars_of_its_window(client: Client, run: Run) -> None:
    whole = ask(client, run, "run-timeline")
    assert len(whole["bars"]["number"]) == 12 * 4 - 1
    assert whole["groups"] == ["compute", "upload", "wait", "apply", "other", "down"]
    commits = {n: whole["from"] + at for n, at, _ in whole["commits"]}
    assert sorted(commits) == list(range(1, 13))
    part = ask(client, run, "run-timeline", **{"from": commits[6] + 1, "to": commits[7] - 1})
    assert set(part["bars"]["number"]) == {7}
    row = Round.objects.get(run=run, number=7).contributions.get(replica__number=2)
    at = part["bars"]["replica"].index(2)
    assert part["bars"]["phases"][at][0] == round(row.phases["compute"] * 1000)
    assert row.started_at is not None
    assert part["bars"]["started"][at] / 1000 + part["from"] == pytest.approx(
        row.started_at.timestamp(), abs=2e-3
    )
    assert whole["slowest"][0] == 3  # longest compute time
    assert whole["counted"] == 11


def test_the_first_round_of_a_single_replica_has_a_bar(client: Client) -> None:
    run = seed.run(seed.user("olga", "operator"), replicas=1, committed=1, total_rounds=20)
    Round.objects.filter(run=run, number__gt=1).delete()
    bars = ask(client, run, "run-timeline")["bars"]
    assert (bars["number"], bars["replica"]) == ([1], [0])


def test_many_bars_are_a_raster(client: Client, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_BARS", 20)
    body = ask(client, run, "run-timeline", columns=90)
    assert body["bars"] is None
    cells = np.frombuffer(base64.b64decode(body["cells"]), dtype=np.uint8).reshape(4, 90)
    assert set((cells[cells != timeline.BLANK] >> 4).tolist()) <= {1, 2, 3, 4, 5}


def test_commits_too_many_for_lines_are_not_sent(
    client: Client, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ask(client, run, "run-timeline")
    monkeypatch.setattr(timeline, "MAX_COMMITS", len(whole["commits"]) - 1)
    assert ask(client, run, "run-timeline")["commits"] == []
    window = {"from": whole["first"], "to": (whole["first"] + whole["last"]) / 2}
    assert ask(client, run, "run-timeline", **window)["commits"]


def test_the_raster_matches_the_bars() -> None:
    """Time of each kind, cell by cell, compared with a count of milliseconds."""
    phases = np.zeros((5, 3, 2))  # group, replica, round
    phases[:, 0, 0], phases[:, 0, 1] = (4, 1, 2, 1, 0), (4, 1, 0, 1, 0)
    phases[0, 1, 0] = 10
    sheet = timeline.RoundBatch(
        numbers=np.array([1, 2]),
        outcome=np.full((3, 2), 2, dtype=np.uint8),
        phases=phases,
        started=np.array([[100.0, 112.0], [103.0, 0.0], [0.0, 0.0]]),
    )
    cells = timeline.raster([sheet], 100.0, 120.0, 10)
    wait, apply_, down = 2, 3, timeline.DOWN
    expected = [
        {},
        {},
        {1: 0.5, wait: 0.5},
        {wait: 0.5, apply_: 0.5},
        {down: 1},
        {down: 1},
        {},
        {},
        {1: 0.5, apply_: 0.5},
        None,
    ]
    for cell, parts in zip(cells[0].tolist(), expected, strict=True):
        if parts is None:
            assert cell == timeline.BLANK
        elif not parts:
            assert cell & 15 == 0
        else:
            assert cell >> 4 in parts
            assert (cell & 15) / 15 == pytest.approx(parts[cell >> 4], abs=0.05)
    assert (cells[1, 2:6] & 15 == 0).all()
    assert (cells[2] == timeline.BLANK).all()


def test_equal_rounds_have_equal_cells() -> None:
    """Columns that cut rounds of nearly their width would show a moiré."""
    rounds, columns = 700, 1000
    phases = np.zeros((5, 1, rounds))
    phases[0], phases[2] = 6, 4  # computes, then waits
    commits = 100.0 + 10 * np.arange(1, rounds + 1)
    even = np.linspace(100.0, commits[-1], columns + 1)
    edges = timeline._edges(even, commits[:-1])
    sheet = timeline.RoundBatch(
        numbers=np.arange(rounds),
        outcome=np.full((1, rounds), 2, dtype=np.uint8),
        started=(commits - 10)[None],
        phases=phases,
    )
    raster = timeline.Raster(edges)
    raster.add(sheet)
    cells = timeline._stretched(raster.cells(), edges, even)
    assert cells.shape == (1, columns)
    assert set(cells[0].tolist()) == {2 * 16 + 6}


def test_a_pause_between_narrow_rounds_keeps_its_ends() -> None:
    commits = np.concatenate([10.0 + np.arange(300), 2000.0 + np.arange(300)])
    even = np.linspace(0.0, 2400.0, 801)  # columns of 3 s
    edges = timeline._edges(even, commits)
    widths = np.diff(edges)
    assert widths[(edges[:-1] > 320) & (edges[1:] < 1990)].max() == pytest.approx(3)
    assert timeline._edges(even, commits[:100]) is even


@pytest.mark.parametrize("bars", [20, 5000])
def test_the_timeline_does_not_depend_on_the_batch_size(
    client: Client, run: Run, monkeypatch: pytest.MonkeyPatch, bars: int
) -> None:
    monkeypatch.setattr(timeline, "MAX_BARS", bars)
    for row in Round.objects.filter(run=run, number__lt=4):  # as if the fourth joined later
        row.outcomes, row.timings = bytes(row.outcomes)[:3], bytes(row.timings)[: 3 * 44]
        row.save()
    whole = ask(client, run, "run-timeline", columns=90)
    monkeypatch.setattr(timeline, "AT_ONCE", 1)
    assert ask(client, run, "run-timeline", columns=90) == whole
    assert (whole["bars"] is None) == (bars == 20)


@pytest.mark.parametrize("name", ["run-series", "run-heatmap", "run-timeline"])
@pytest.mark.parametrize("size", [2, 18])
def test_the_number_of_queries_is_constant(
    client: Client, name: str, size: int, django_assert_max_num_queries: Any
) -> None:
    owner = seed.user("olga", "operator")
    run = seed.run(owner, committed=size, replicas=size, sync_every=40)
    assert run.first_step_at is not None
    has_started = run.first_step_at + timedelta(seconds=3)
    query = {"of": "loss,norm", "x": "wall", "from": has_started.timestamp(), "points": "10"}
    with django_assert_max_num_queries({"run-series": 14}.get(name, 6)):
        ask(client, run, name, **query)


def test_strips_grow_with_later_replicas(run: Run) -> None:
    row = Round.objects.get(run=run, number=3)
    round_strips.put(row, [(9, row.contributions.first())])
    row.save()
    result = timeline.outcomes(run)
    assert result.outcomes.shape == (13, 10)
    assert result.outcomes[2, 9] == 2


def test_the_curve_of_one_replica_comes_with_the_band_of_all(client: Client, run: Run) -> None:
    body = ask(client, run, of="loss", own="2")
    assert [c["replica"] for c in body["curves"]] == [2]
    assert len(body["band"]["mean"]) == 731
    assert (
        client.get(reverse("run-series", args=[run.pk]), {"of": "loss", "own": "x"}).status_code
        == 400
    )


def test_points_at_different_steps_form_one_band(client: Client, run: Run) -> None:
    """Metrics per segment: each replica has one every eighth step, at different steps."""
    for replica in run.replicas.all():
        steps = range(replica.number * 2, 720, 8)
        points = Points.of(
            step=list(steps),
            round=[1] * len(steps),
            tokens=list(steps),
            wall_s=list(steps),
            value=[float(replica.number)] * len(steps),
        )
        downsampling.add_points(run, replica, {"rss_bytes": points}, key="step")
    band = ask(client, run, of="rss_bytes")["band"]
    assert set(band["low"]) == {0.0}
    assert set(band["high"]) == {3.0}
    assert set(band["mean"]) == {1.5}


def test_replicas_that_report_later_count_with_their_newest_value(client: Client, run: Run) -> None:
    """The one that is more than a round behind does not count any more."""
    last, spacing = 731, run.group_settings["sync_every"]
    for number, ahead, value in ((0, 20, 1.0), (1, 10, 1.5), (2, 0, 0.0)):
        steps = list(range(last + 1, last + 1 + ahead))
        add_losses(run, number, steps, value)
    band = ask(client, run, of="loss")["band"]
    newest = {c["replica"]: c["y"][-1] for c in ask(client, run, of="loss")["curves"]}
    assert dict(map(tuple, band["newest"])) == newest
    assert x_of(band)[-1] == last + 20
    assert (band["low"][-1], band["high"][-1]) == (min(newest.values()), max(newest.values()))
    assert band["mean"][-1] == pytest.approx(sum(newest.values()) / 4, rel=1e-5)
    add_losses(run, 0, range(last + 21, last + 1 + spacing + 5), 1.0)
    band = ask(client, run, of="loss")["band"]
    assert [n for n, _ in band["newest"]] == [0, 1]
    assert (band["low"][-1], band["high"][-1]) == (1.0, 1.5)


def add_losses(run: Run, replica: int, steps: Iterable[int], value: float) -> None:
    steps = list(steps)
    points = Points.of(
        step=steps, round=[1] * len(steps), tokens=steps, wall_s=steps, value=[value] * len(steps)
    )
    downsampling.add_points(run, run.replicas.get(number=replica), {"loss": points}, key="step")


def test_a_chart_does_not_read_the_header_of_its_run(
    client: Client, run: Run, django_assert_max_num_queries: Any
) -> None:
    with django_assert_max_num_queries(8) as queries:
        ask(client, run, of="loss")
    assert not any("alert_count" in one["sql"] for one in queries.captured_queries)
