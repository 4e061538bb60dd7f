"""What a replica says of the time before its first step."""

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
    """A clock that stands still, ``age`` seconds after this process' own beginning."""

    def __init__(self) -> None:
        self.now_s = SystemClock().monotonic()

    def wall(self) -> float:
        return 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody waits here")


def startup(**environment: str) -> tuple[dict[str, float], float]:
    """Phases when the start is over now, and how old the process was then."""
    clock = Now()
    found = startup_of_process(environment, clock)
    return found.until(clock.now_s), process_age_s(clock)


def test_the_bootstrap_is_taken_out_of_the_age_of_the_process() -> None:
    phases, age_s = startup(DILOCO_BOOTSTRAP='{"install_s": 0.2, "fetch_s": 0.1}')
    assert phases["bootstrap"] == pytest.approx(0.3)
    assert phases["start"] == pytest.approx(age_s - 0.3, abs=0.5)
    phases, age_s = startup(DILOCO_BOOTSTRAP='{"install_s": 1e9, "fetch_s": 1}', WORLD_SIZE="2")
    assert phases["start"] == pytest.approx(age_s, abs=0.5), "torchrun's processes are their own"
    assert startup(DILOCO_BOOTSTRAP='{"install_s": 1e9, "fetch_s": 1}')[0]["start"] == 0.0


@pytest.mark.parametrize(
    "said",
    [
        "soon", "[]", "{}", '{"install_s": 1}', '{"install_s": -1, "fetch_s": 0}',
        '{"install_s": NaN, "fetch_s": 0}', '{"install_s": 1e999, "fetch_s": 0}',
        '{"install_s": [], "fetch_s": 0}', "[" * 100_000,
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_ignored_with_a_warning(
    said: str, caplog: pytest.LogCaptureFixture
) -> None:
    phases, age_s = startup(DILOCO_BOOTSTRAP=said)
    assert list(phases) == ["start"] and phases["start"] == pytest.approx(age_s, abs=0.5)
    assert "DILOCO_BOOTSTRAP: expected JSON with install_s and fetch_s" in caplog.text
    assert len(caplog.text) < 1000


def test_nothing_said_is_nothing_wrong(caplog: pytest.LogCaptureFixture) -> None:
    assert list(startup()[0]) == ["start"]
    assert not caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_age_of_a_process_counts_its_interpreter_and_survives_exec() -> None:
    """It waited before it became what asks: that is in its age, as the bootstrap is."""
    ask = (
        "from diloco.telemetry.startup_timing import process_age_s, IMPORTED_S; "
        "from diloco.clock import SystemClock as C; "
        "print(process_age_s(C()), C().monotonic() - IMPORTED_S)"
    )
    before = "import os, sys, time; time.sleep(0.5); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", before, sys.executable, "-c", ask]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
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
def test_where_proc_knows_nothing_the_age_is_since_the_import(
    tmp_path: Path, stat: str, uptime: str
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/stat").write_text(stat)
    (tmp_path / "uptime").write_text(uptime)
    clock = Now()
    assert process_age_s(clock, tmp_path) == process_age_s(clock, tmp_path / "nothing")


def test_it_is_told_once_with_the_first_round(tiny_group: Callable[..., Any]) -> None:
    group = tiny_group(num_replicas=1, total_rounds=3)
    member = group.start(0)
    group.wait()
    assert member.error is None
    listed = [info.key for info in group.store.list("telemetry/")]
    segments = [Segment.from_bytes(group.store.get(key)) for key in sorted(listed)]
    first, *others = [report.phases for segment in segments for report in segment.rounds]
    assert first["start"] > 0 and len(others) == 2
    assert not any({"start", "bootstrap"} & set(phases) for phases in others)


def test_phases_before_and_the_start_itself() -> None:
    assert Startup(began_s=5.0, phases={"bootstrap": 3.0}).until(7.0) == {
        "bootstrap": 3.0,
        "start": 2.0,
    }
    assert Startup(began_s=5.0).until(4.0) == {"start": 0.0}
