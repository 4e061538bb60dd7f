"""Reported resource usage as series; a missing value has no point."""

from __future__ import annotations

import math
from typing import Any

import pytest

from runs.ingest.system_metrics import usage_points
from runs.metrics.system_series import NEWEST
from runs.models import MetricBlock
from runs.queries import fleet
from runs.queries.selectors import points
from tests.runs.ingest_harness import IngestHarness

pytestmark = pytest.mark.django_db


def series() -> set[str]:
    other = MetricBlock.objects.filter(replica__isnull=False)
    return set(other.values_list("series", flat=True)) - {"loss", "lr"}


def values(ingest: IngestHarness, name: str) -> list[tuple[int, float]]:
    result = points(ingest.run, name, replica=0)
    return list(zip(result["step"], result["value"], strict=True))


def test_a_segment_is_placed_at_its_last_step(ingest: IngestHarness) -> None:
    used = {"rss_bytes": 3e8, "cpu_cores": 1.5, "cpu_s": 40.0, "gpu_busy": 0.0}
    ingest.bucket.segment(0, 1, losses=[5.0, 4.0], system=used)
    ingest.bucket.segment(0, 2, losses=[3.0], first=3, system={"rss_bytes": 4e8})
    ingest.ingest()
    assert values(ingest, "rss_bytes") == [(2, 3e8), (3, 4e8)]
    assert values(ingest, "cpu_cores") == [(2, 1.5)]
    assert values(ingest, "gpu_busy") == [(2, 0.0)]  # reported as idle: that is a 0
    assert series() == {"rss_bytes", "cpu_cores", "gpu_busy"}


def test_unknown_or_implausible_values_have_no_point(ingest: IngestHarness) -> None:
    used = {"rss_bytes": math.nan, "cpu_cores": -1.0, "gpu_busy": math.inf, "made_up": 3.0}
    ingest.bucket.segment(0, 1, losses=[5.0], system=used)
    ingest.bucket.segment(0, 2, losses=[], system={"rss_bytes": 1.0})
    ingest.ingest()
    assert series() == set()
    assert ingest.cursor().refused == 0


def test_bytes_and_bandwidth_of_a_round(ingest: IngestHarness) -> None:
    report = ingest.bucket.report(
        1,
        step=2,
        tokens=2000,
        bytes_up=100,
        bytes_down=0,
        phases={"compute": 6.0, "upload": 0.5},
        background={"upload": 1.5},
    )
    ingest.bucket.segment(0, 1, losses=[5.0, 4.0], rounds=(report,))
    ingest.ingest()
    assert values(ingest, "bytes_up") == [(2, 100.0)]
    assert values(ingest, "up_bytes_per_s") == [(2, 50.0)]
    assert values(ingest, "bytes_down") == [(2, 0.0)]
    assert values(ingest, "down_bytes_per_s") == []  # nothing was moved: no speed, not 0


def test_a_process_without_a_step_has_no_points(ingest: IngestHarness) -> None:
    ingest.bucket.segment(0, 1, losses=[], rounds=(ingest.bucket.report(1),))
    ingest.ingest()
    assert series() == set()
    assert ingest.run.bytes_up == 100


@pytest.mark.parametrize("step", [-1, 2**62])
def test_an_invalid_step_is_refused(ingest: IngestHarness, step: int) -> None:
    ingest.bucket.segment(0, 1, losses=[5.0], rounds=(ingest.bucket.report(1, step=step),))
    ingest.ingest()
    assert ingest.cursor().refused == 1
    assert usage_points([]) == {}


def test_the_newest_values_are_in_the_row_of_a_working_replica(ingest: IngestHarness) -> None:
    def row() -> dict[str, Any]:
        return {name: fleet.replica_rows(ingest.run)[0][name] for name in NEWEST}

    unknown = dict.fromkeys(NEWEST)
    assert row() == unknown
    report = ingest.bucket.report(
        1, step=1, bytes_up=100, bytes_down=600, phases={"upload": 0.5, "download": 2.0}
    )
    used = {"gpu_busy": 0.5, "gpu_memory_bytes": 7e9, "rss_bytes": 1.0}
    ingest.bucket.segment(0, 1, losses=[5.0], system=used, rounds=(report,))
    ingest.bucket.segment(0, 2, losses=[4.0], first=2, system={"gpu_busy": 0.25})
    assert ingest.ingest().replicas
    result = {
        "gpu_busy": 0.25,
        "gpu_memory_bytes": 7e9,
        "up_bytes_per_s": 200.0,
        "down_bytes_per_s": 300.0,
    }
    replicas = ingest.run.replicas.filter(number=0)
    for state in ("computing", "draining", "suspect"):
        replicas.update(state=state)
        assert row() == result
    for state in ("restarting", "provisioning", "done", "lost"):
        replicas.update(state=state)
        assert row() == unknown  # nothing is there that uses anything
