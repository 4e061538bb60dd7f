"""Resource usage of a process: measured or omitted, never 0 for unknown."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch

from diloco.telemetry import system_metrics
from diloco.telemetry.system_metrics import Usage


class Watch:
    now = 100.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_cores_are_cpu_seconds_per_second_since_the_last_read() -> None:
    clock, spent = Watch(), [5.0]
    meter = Usage(clock, cpu_s=lambda: spent[0])
    assert "cpu_cores" not in meter.read()  # no time has passed, so the rate is unknown
    clock.now, spent[0] = 104.0, 11.0
    assert meter.read()["cpu_cores"] == 1.5
    clock.now = 106.0
    assert meter.read()["cpu_cores"] == 0.0
    assert meter.read()["cpu_s"] == 11.0


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_resident_memory_grows_with_an_allocation() -> None:
    meter = Usage(Watch())
    before = meter.read()["rss_bytes"]
    # New pages: the allocator can reuse memory that earlier tests have freed.
    held = mmap.mmap(-1, 64_000_000)
    for page in range(0, len(held), mmap.PAGESIZE):
        held[page] = 1
    after = meter.read()
    assert after["rss_bytes"] - before > 50_000_000
    assert after["max_rss_bytes"] >= after["rss_bytes"] * 0.9
    held.close()


def test_without_a_gpu_there_are_no_gpu_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    result = Usage(Watch(), gpu_busy=lambda: 0.5).read()
    assert not [name for name in result if name.startswith("gpu")]


@pytest.mark.parametrize("busy", [None, 0.0, 0.75])
def test_unknown_utilisation_is_omitted(
    monkeypatch: pytest.MonkeyPatch, busy: float | None
) -> None:
    for name, value in (
        ("is_available", True),
        ("is_initialized", True),
        ("memory_allocated", 7),
        ("max_memory_allocated", 9),
        ("mem_get_info", (1, 80)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    result = Usage(Watch(), gpu_busy=lambda: busy).read()
    assert result["gpu_memory_bytes"] == 7.0
    assert result["gpu_memory_total_bytes"] == 80.0
    assert result.get("gpu_busy") == busy


def test_without_nvml_utilisation_is_unknown() -> None:
    nvml = system_metrics._Nvml()
    if not torch.cuda.is_available():
        assert nvml.busy() is None
        assert nvml._failed
