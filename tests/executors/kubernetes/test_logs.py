"""Continue a log after a line: the API counts in seconds, and lines can share a timestamp."""

from __future__ import annotations

import pytest

from executors.kubernetes.logs import behind, lines, since

LOG = [
    "2026-11-21T10:00:00.5Z before",
    "2026-11-21T10:00:01.000000001Z one",
    "2026-11-21T10:00:01.000000001Z one",
    "2026-11-21T10:00:01.2Z two",
    # Written to the other output at the same time, with an earlier timestamp.
    "2026-11-21T10:00:01.19Z three",
    "2026-11-21T10:00:01.200000001Z ",
    "2026-11-21T10:00:09.000000000Z five",
]
TEXTS = ["before", "one", "one", "two", "three", "", "five"]


def from_second(second: str) -> list[str]:
    """The API's lines from that second on."""
    return [line for line in LOG if line >= second]


def test_all_of_it() -> None:
    result = list(behind(LOG, ""))
    assert [line.text for line in result] == TEXTS
    assert len({line.position for line in result}) == len(LOG)


@pytest.mark.parametrize("n", range(len(LOG)))
def test_reading_continues_after_every_line(n: int) -> None:
    after = list(behind(LOG, ""))[n].position
    requested = since(after)
    assert "." not in requested and requested.endswith("Z")
    result = list(behind(from_second(requested.removesuffix("Z")), after))
    assert [line.text for line in result] == TEXTS[n + 1 :]
    assert [line.position for line in result] == [
        line.position for line in list(behind(LOG, ""))[n + 1 :]
    ]


def test_a_deleted_line_hides_no_later_line() -> None:
    after = "2026-11-21T10:00:01.1Z#1"
    assert [line.text for line in behind(LOG, after)] == ["two", "three", "", "five"]
    # All lines are later by less than a second, so they are returned at the end of the log.
    assert [line.text for line in behind(LOG[:4], after)] == ["two"]


def test_a_line_without_a_time_is_returned() -> None:
    result = list(behind([LOG[0], "failed to watch file", LOG[6]], ""))
    assert [line.text for line in result] == ["before", "failed to watch file", "five"]
    assert len({line.position for line in result}) == 3
    assert [line.text for line in behind([LOG[0], "failed", LOG[6]], result[1].position)] == [
        "five"
    ]


@pytest.mark.parametrize("stamp", ["2026-11-21T12:00:01.25+02:00", "2026-11-21T10:00:01Z"])
def test_times_of_any_zone(stamp: str) -> None:
    assert since(f"{stamp}#1") == stamp.replace(".25", "")
    assert [line.text for line in behind([f"{stamp} x", f"{stamp} y"], f"{stamp}#1")] == ["y"]


def test_lines_of_chunks() -> None:
    assert list(lines([b"a\nb", b"", b"c\n", b"\xc3", b"\xbc\nend"])) == ["a", "bc", "ü", "end"]
    assert list(lines([])) == []
