"""What jobs print: all of it, in order, while they run, and on from where one stopped reading."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from executors.base import LogLine
from tests.executors.worlds import (
    LIMIT_S,
    World,
    end_of,
    every_world,
    launch,
    number_in,
    text_of,
)
from tests.servers import wait_until

pytestmark = pytest.mark.processes


@every_world()
def test_logs_are_whole_and_in_order(world: World) -> None:
    executor = world.executor()
    said = [f"line {n} äöü" for n in range(300)]
    handle = launch(executor, "exit", 0, *said)
    end_of(executor, handle)
    assert text_of(executor, handle) == said


@every_world()
def test_reading_goes_on_where_it_stopped(world: World) -> None:
    executor = world.executor()
    # the same text again: a position names a line, not its text
    said = [f"line {n % 3}" for n in range(30)]
    handle = launch(executor, "exit", 0, *said)
    end_of(executor, handle)
    lines = list(executor.logs(handle))
    assert [line.text for line in lines] == said
    assert len({line.position for line in lines}) == len(lines)
    for stop in (1, 7, 29, 30):
        after = lines[stop - 1].position
        assert list(world.executor().logs(handle, after=after)) == lines[stop:]
    assert list(executor.logs(handle, after=lines[10].position, follow=True)) == lines[11:]


@every_world("follow")
def test_a_running_jobs_lines_are_followed_to_the_last(world: World, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "lines", tmp_path / "go on")
    lines = executor.logs(handle, follow=True)
    assert next(lines).text == "first"
    (tmp_path / "go on").touch()
    assert [line.text for line in lines] == ["second", "no newline at the end"]


@every_world("follow")
def test_following_goes_on_where_it_stopped(world: World, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "lines", tmp_path / "go on")
    (first,) = islice(executor.logs(handle, follow=True), 1)
    (tmp_path / "go on").touch()
    rest = world.executor().logs(handle, after=first.position, follow=True)
    assert [line.text for line in rest] == ["second", "no newline at the end"]


@every_world()
def test_a_running_jobs_lines_so_far_are_read_without_waiting(world: World, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "lines", tmp_path / "go on")
    seen: list[LogLine] = []

    def is_written() -> bool:
        seen[:] = executor.logs(handle)
        return bool(seen)

    wait_until(is_written, "the first line", timeout_s=LIMIT_S)
    assert [line.text for line in seen] == ["first"]
    (tmp_path / "go on").touch()
    end_of(executor, handle)


@every_world()
def test_a_silent_job_has_no_lines(world: World, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    executor.cancel([handle])
    end_of(executor, handle)
    assert text_of(executor, handle) == []
    assert list(executor.logs(handle, follow=True)) == []


@every_world("lose")
def test_a_lost_jobs_logs_end(world: World, tmp_path: Path) -> None:
    executor = world.executor()
    handle = launch(executor, "wait", tmp_path / "up")
    number_in(tmp_path / "up")
    world.lose(handle)
    list(executor.logs(handle))
    list(executor.logs(handle, follow=True))
