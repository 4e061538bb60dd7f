"""What replicas say they used, as series; what they do not say has no point."""

from __future__ import annotations

import math
from typing import Any

import pytest

from runs.ingest.system_metrics import usage_points
from runs.metrics.system_series import NEWEST
from runs.models import MetricBlock
from runs.queries import fleet
from runs.queries.selectors import points
from tests.runs.desk import Desk

pytestmark = pytest.mark.django_db


def series() -> set[str]:
    theirs = MetricBlock.objects.filter(replica__isnull=False)
    return set(theirs.values_list("series", flat=True)) - {"loss", "lr"}


def values(desk: Desk, name: str) -> list[tuple[int, float]]:
    found = points(desk.run, name, replica=0)
    return list(zip(found["step"], found["value"], strict=True))


def test_a_segment_tells_of_its_last_step(desk: Desk) -> None:
    used = {"rss_bytes": 3e8, "cpu_cores": 1.5, "cpu_s": 40.0, "gpu_busy": 0.0}
    desk.bucket.segment(0, 1, losses=[5.0, 4.0], system=used)
    desk.bucket.segment(0, 2, losses=[3.0], first=3, system={"rss_bytes": 4e8})
    desk.ingest()
    assert values(desk, "rss_bytes") == [(2, 3e8), (3, 4e8)]
    assert values(desk, "cpu_cores") == [(2, 1.5)]
    assert values(desk, "gpu_busy") == [(2, 0.0)]  # told, and idle: that is a 0
    assert series() == {"rss_bytes", "cpu_cores", "gpu_busy"}


def test_what_is_unknown_or_makes_no_sense_has_no_point(desk: Desk) -> None:
    used = {"rss_bytes": math.nan, "cpu_cores": -1.0, "gpu_busy": math.inf, "made_up": 3.0}
    desk.bucket.segment(0, 1, losses=[5.0], system=used)
    desk.bucket.segment(0, 2, losses=[], system={"rss_bytes": 1.0})
    desk.ingest()
    assert series() == set()
    assert desk.cursor().refused == 0


def test_bytes_and_bandwidth_of_a_round(desk: Desk) -> None:
    report = desk.bucket.report(
        1, step=2, tokens=2000, bytes_up=100, bytes_down=0,
        phases={"compute": 6.0, "upload": 0.5}, background={"upload": 1.5},
    )  # fmt: skip
    desk.bucket.segment(0, 1, losses=[5.0, 4.0], rounds=(report,))
    desk.ingest()
    assert values(desk, "bytes_up") == [(2, 100.0)]
    assert values(desk, "up_bytes_per_s") == [(2, 50.0)]
    assert values(desk, "bytes_down") == [(2, 0.0)]
    assert values(desk, "down_bytes_per_s") == []  # nothing was moved: no speed, not 0


def test_a_process_that_has_taken_no_step_places_nothing(desk: Desk) -> None:
    desk.bucket.segment(0, 1, losses=[], rounds=(desk.bucket.report(1),))
    desk.ingest()
    assert series() == set()
    assert desk.run.bytes_up == 100


@pytest.mark.parametrize("step", [-1, 2**62])
def test_a_step_that_is_none_is_refused(desk: Desk, step: int) -> None:
    desk.bucket.segment(0, 1, losses=[5.0], rounds=(desk.bucket.report(1, step=step),))
    desk.ingest()
    assert desk.cursor().refused == 1
    assert usage_points([]) == {}


def test_the_newest_figures_stand_in_the_row_of_a_replica_at_work(desk: Desk) -> None:
    def row() -> dict[str, Any]:
        return {name: fleet.replica_rows(desk.run)[0][name] for name in NEWEST}

    unknown = dict.fromkeys(NEWEST)
    assert row() == unknown
    report = desk.bucket.report(
        1, step=1, bytes_up=100, bytes_down=600, phases={"upload": 0.5, "download": 2.0}
    )
    used = {"gpu_busy": 0.5, "gpu_memory_bytes": 7e9, "rss_bytes": 1.0}
    desk.bucket.segment(0, 1, losses=[5.0], system=used, rounds=(report,))
    desk.bucket.segment(0, 2, losses=[4.0], first=2, system={"gpu_busy": 0.25})
    assert desk.ingest().replicas
    found = {
        "gpu_busy": 0.25, "gpu_memory_bytes": 7e9, "up_bytes_per_s": 200.0,
        "down_bytes_per_s": 300.0,
    }  # fmt: skip
    replicas = desk.run.replicas.filter(number=0)
    for state in ("computing", "draining", "suspect"):
        replicas.update(state=state)
        assert row() == found
    for state in ("restarting", "provisioning", "done", "lost"):
        replicas.update(state=state)
        assert row() == unknown  # nothing is there that uses anything
