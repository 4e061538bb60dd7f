"""Conversion of the Hub's jobs and hardware into statuses and the catalogue."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from huggingface_hub import JobHardwareInfo, JobInfo

from executors.huggingface.hardware import table_of
from executors.huggingface.status import status_of


def job(stage: str, message: str | None = None, **more: Any) -> JobInfo:
    owner = {"id": "0" * 24, "name": "islands", "type": "user"}
    return JobInfo(id="1", owner=owner, status={"stage": stage, "message": message}, **more)


@pytest.mark.parametrize(
    ("reported", "state", "cause", "exit_code"),
    [
        (job("SCHEDULING"), "pending", None, None),
        (job("RUNNING"), "running", None, None),
        (job("BUILDING"), "pending", None, None),
        (job("PAUSING", startedAt="2026-01-01T00:00:00.000Z"), "running", None, None),
        (job("COMPLETED"), "ended", "done", 0),
        (job("CANCELED"), "ended", "cancelled", None),
        (job("DELETED"), "ended", "lost", None),
        (job("ERROR"), "ended", "error", None),
        (job("ERROR", "Job timeout"), "ended", "deadline", None),
        (job("ERROR", "Job failed with exit code: 78. Reason: Error"), "ended", "error", 78),
        (job("ERROR", "Job failed with exit code: 1"), "ended", "error", 1),
        (
            job("ERROR", "Job failed with exit code: 137. Reason: OOMKilled"),
            *("ended", "out_of_memory", 137),
        ),
        (
            job("ERROR", "Job failed with exit code: 137. Reason: Evicted"),
            *("ended", "preempted", 137),
        ),
        (job("ERROR", "Job failed with exit code: 137. Reason: Error"), "ended", "error", 137),
    ],
)
def test_statuses_of_the_hub_are_converted(
    reported: JobInfo, state: str, cause: str | None, exit_code: int | None
) -> None:
    status = status_of(reported)
    assert (status.state, status.cause, status.exit_code) == (state, cause, exit_code)
    assert status.phase == reported.status.stage


def test_times_and_bill_are_the_hubs() -> None:
    status = status_of(
        job(
            "ERROR",
            "Job timeout",
            startedAt="2026-01-01T00:00:10.000Z",
            finishedAt="2026-01-01T00:02:11.000Z",
            durations={"schedulingSecs": 10, "runningSecs": 121, "totalSecs": 131},
            labels={"archipelago-timeout-s": "120"},
        )
    )
    assert status.started_wall_s is not None
    assert status.ended_wall_s == status.started_wall_s + 121
    assert status.deadline_wall_s == status.started_wall_s + 120
    assert status.billed_s == 180  # whole minutes


def test_missing_values_of_the_hub_are_none() -> None:
    (hardware,) = table_of(
        [
            JobHardwareInfo(
                name="tpu",
                prettyName="TPU",
                cpu="N/A",
                ram="N/A",
                unitCostMicroUSD=1,
                unitCostUSD=0.000001,
                unitLabel="token",
            )
        ],
        read_on="2026-01-01",
        source="here",
    ).hardware
    assert (hardware.cpus, hardware.memory_gib, hardware.price_usd_h) == (None, None, None)


def test_the_table_of_hardware_loads_no_client() -> None:
    code = "import sys, executors.registry; assert 'huggingface_hub' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
