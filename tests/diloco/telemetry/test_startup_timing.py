"""The durations that a replica reports for the time before its first step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.clock import SystemClock
from diloco.protocol.telemetry import Segment
from diloco.telemetry.startup_timing import Startup, process_age_s, startup_of_process


class Now:
    """A stopped clock, ``age`` seconds after the start of this process."""

    def __init__(self) -> None:
        self.now_s = SystemClock().monotonic()

    def wall(self) -> float:
        return 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        raise AssertionError("expected no wait")


def startup(**environment: str) -> tuple[dict[str, float], float]:
    """The phases if the start ends now, and the age of the process."""
    clock = Now()
    result = startup_of_process(environment, clock)
    return result.until(clock.now_s), process_age_s(clock)


def test_the_bootstrap_is_subtracted_from_the_process_age() -> None:
    phases, age_s = startup(DILOCO_BOOTSTRAP='{"install_s": 0.2, "fetch_s": 0.1}')
    assert phases["bootstrap"] == pytest.approx(0.3)
    assert phases["start"] == pytest.approx(age_s - 0.3, abs=0.5)
    phases, age_s = startup(DILOCO_BOOTSTRAP='{"install_s": 1e9, "fetch_s": 1}', WORLD_SIZE="2")
    assert phases["start"] == pytest.approx(age_s, abs=0.5), "torchrun's processes are their own"
    assert startup(DILOCO_BOOTSTRAP='{"install_s": 1e9, "fetch_s": 1}')[0]["start"] == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "soon",
        "[]",
        "{}",
        '{"install_s": 1}',
        '{"install_s": -1, "fetch_s": 0}',
        '{"install_s": NaN, "fetch_s": 0}',
        '{"install_s": 1e999, "fetch_s": 0}',
        '{"install_s": [], "fetch_s": 0}',
        "[" * 100_000,
    ],
)
def test_invalid_values_are_ignored_with_a_warning(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    phases, age_s = startup(DILOCO_BOOTSTRAP=text)
    assert list(phases) == ["start"] and phases["start"] == pytest.approx(age_s, abs=0.5)
    assert "DILOCO_BOOTSTRAP: expected JSON with install_s and fetch_s" in caplog.text
    assert len(caplog.text) < 1000


def test_a_missing_variable_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert list(startup()[0]) == ["start"]
    assert not caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_process_age_includes_the_interpreter_and_survives_exec() -> None:
    """The process waited before its exec; its age includes that time, like the bootstrap."""
    ask = (
        "from diloco.telemetry.startup_timing import process_age_s, IMPORTED_S; "
        "from diloco.clock import SystemClock as C; "
        "print(process_age_s(C()), C().monotonic() - IMPORTED_S)"
    )
    before = "import os, sys, time; time.sleep(0.5); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", before, sys.executable, "-c", ask]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    age_s, since_import_s = map(float, done.stdout.split())
    assert age_s >= since_import_s + 0.5


@pytest.mark.parametrize(
    ("stat", "uptime"),
    [
        ("1 (a) b) S " + "0 " * 30, "9e9 1"),
        ("1 (a) S " + "900 " * 30, "0.1 1"),
        ("", ""),
        ("x", "y"),
    ],
)
def test_without_proc_the_age_is_since_the_import(tmp_path: Path, stat: str, uptime: str) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/stat").write_text(stat)
    (tmp_path / "uptime").write_text(uptime)
    clock = Now()
    assert process_age_s(clock, tmp_path) == process_age_s(clock, tmp_path / "nothing")


def test_startup_phases_are_reported_once_with_the_first_round(
    tiny_group: Callable[..., Any],
) -> None:
    group = tiny_group(num_replicas=1, total_rounds=3)
    member = group.start(0)
    group.wait()
    assert member.error is None
    listed = [info.key for info in group.store.list("telemetry/")]
    segments = [Segment.from_bytes(group.store.get(key)) for key in sorted(listed)]
    first, *others = [report.phases for segment in segments for report in segment.rounds]
    assert first["start"] > 0 and len(others) == 2
    assert not any({"start", "bootstrap"} & set(phases) for phases in others)


def test_phases_include_the_start() -> None:
    assert Startup(began_s=5.0, phases={"bootstrap": 3.0}).until(7.0) == {
        "bootstrap": 3.0,
        "start": 2.0,
    }
    assert Startup(began_s=5.0).until(4.0) == {"start": 0.0}
