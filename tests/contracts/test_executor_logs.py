"""Logs of jobs: complete and in order, while a job runs, and from a position."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from executors.base import LogLine
from tests.executors.harnesses import (
    LIMIT_S,
    Harness,
    end_of,
    every_harness,
    launch,
    number_in,
    text_of,
)
from tests.servers import wait_until

pytestmark = pytest.mark.processes


@every_harness()
def test_logs_are_complete_and_in_order(harness: Harness) -> None:
    executor = harness.executor()
    printed = [f"line {n} äöü" for n in range(300)]
    handle = launch(executor, "exit", 0, *printed)
    end_of(executor, handle)
    assert text_of(executor, handle) == printed


@every_harness()
def test_reading_continues_at_a_position(harness: Harness) -> None:
    executor = harness.executor()
    # Repeated texts: a position identifies a line, not its text.
    printed = [f"line {n % 3}" for n in range(30)]
    handle = launch(executor, "exit", 0, *printed)
    end_of(executor, handle)
    lines = list(executor.logs(handle))
    assert [line.text for line in lines] == printed
    assert len({line.position for line in lines}) == len(lines)
    for stop in (1, 7, 29, 30):
        after = lines[stop - 1].position
        assert list(harness.executor().logs(handle, after=after)) == lines[stop:]
    assert list(executor.logs(handle, after=lines[10].position, follow=True)) == lines[11:]


@every_harness("follow")
def test_logs_of_a_running_job_are_followed_to_the_end(harness: Harness, tmp_path: Path) -> None:
    executor = harness.executor()
    handle = launch(executor, "lines", tmp_path / "go on")
    lines = executor.logs(handle, follow=True)
    assert next(lines).text == "first"
    (tmp_path / "go on").touch()
    assert [line.text for line in lines] == ["second", "no newline at the end"]


@every_harness("follow")
def test_following_continues_at_a_position(harness: Harness, tmp_path: Path) -> None:
    executor = harness.executor()
    handle = launch(executor, "lines", tmp_path / "go on")
    (first,) = islice(executor.logs(handle, follow=True), 1)
    (tmp_path / "go on").touch()
    rest = harness.executor().logs(handle, after=first.position, follow=True)
    assert [line.text for line in rest] == ["second", "no newline at the end"]


@every_harness()
def test_logs_of_a_running_job_are_read_without_waiting(harness: Harness, tmp_path: Path) -> None:
    executor = harness.executor()
    handle = launch(executor, "lines", tmp_path / "go on")
    seen: list[LogLine] = []

    def is_written() -> bool:
        seen[:] = executor.logs(handle)
        return bool(seen)

    wait_until(is_written, "the first line", timeout_s=LIMIT_S)
    assert [line.text for line in seen] == ["first"]
    (tmp_path / "go on").touch()
    end_of(executor, handle)


@every_harness()
def test_job_without_output_has_no_lines(harness: Harness, tmp_path: Path) -> None:
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    executor.cancel([handle])
    end_of(executor, handle)
    assert text_of(executor, handle) == []
    assert list(executor.logs(handle, follow=True)) == []


@every_harness("lose")
def test_logs_of_a_lost_job_end(harness: Harness, tmp_path: Path) -> None:
    executor = harness.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    harness.lose(handle)
    list(executor.logs(handle))
    list(executor.logs(handle, follow=True))
