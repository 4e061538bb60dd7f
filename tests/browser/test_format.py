"""The formats of numbers and times in `static/js/lib/format.js`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.conftest import REPOSITORY

pytestmark = pytest.mark.browser

# Inside the bundle the functions have no names.
SOURCE = (REPOSITORY / "static/js/lib/format.js").read_text().replace("export ", "")
AXES = {
    "short 20100 20120 20140": ["20.10k", "20.12k", "20.14k"],
    "short 20000 20500 21000": ["20.0k", "20.5k", "21.0k"],
    "short 2.34512 2.34514 2.34516": ["2.34512", "2.34514", "2.34516"],
    "short 0.00012345 0.00012346 0.00012347": ["1.2345e-4", "1.2346e-4", "1.2347e-4"],
    "short 9990 9995 10000 10005": ["9,990", "9,995", "10.000k", "10.005k"],
    "short -0.00002 0 0.00002": ["-2.00e-5", "0", "2.00e-5"],
    "size 1950000 1950500 1951000": ["1.9500 MB", "1.9505 MB", "1.9510 MB"],
    "size 1887e12 1888e12 1889e12": ["1.887 PB", "1.888 PB", "1.889 PB"],
    "count 1000000 1002000 null 1004000": ["1.000M", "1.002M", "", "1.004M"],
    "duration 7200 7210 7220": ["2:00:00", "2:00:10", "2:00:20"],
    "duration 200 200.5 201": ["0:03:20.0", "0:03:20.5", "0:03:21.0"],
}
TICKS = {
    # Some hours of today have no date.
    "2026-11-23T08:00 2026-11-23T12:00": ["08:00", "12:00"],
    "2026-11-23T08:00:00 2026-11-23T08:00:15": ["08:00:00", "08:00:15"],
    # The first tick of each day has it.
    "2026-11-21T16:00 2026-11-22T00:00 2026-11-22T08:00": ["Nov 21, 16:00", "Nov 22", "08:00"],
    "2026-11-22T23:40 2026-11-23T00:10": ["Nov 22, 23:40", "Nov 23, 00:10"],
    # So does another day than today.
    "2026-11-20T08:00 2026-11-20T12:00": ["Nov 20, 08:00", "12:00"],
    "2026-11-20T00:00 2026-11-21T00:00": ["Nov 20", "Nov 21"],
}


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """An empty page."""
    with browser.new_context() as context:
        yield context.new_page()


def test_server_and_browser_format_numbers_alike(page: Page) -> None:
    from dashboard.presentation import formats

    small = [None, 0, 0.004, 0.5, 1.5, 2.25, 7.349, 9.94, 9.96, 59.4, 61, 999.5]
    large = [9_999, 10_000, 99_950, 123_456, 999_999, 1_966_080, 59_000_000, 2.5e9, 86_400, 90_061]
    values = [*small, *large, 80e9, 999.6e9, 2.345e12, 1.888e15]
    for name in ("count", "size", "loss", "duration", "elapsed", "age", "percent"):
        result = page.evaluate(f"(values) => {{ {SOURCE}\n return values.map({name}); }}", values)
        assert result == [getattr(formats, name)(value) for value in values], name


def test_server_and_browser_shorten_a_reason_alike(page: Page) -> None:
    from dashboard.presentation import formats

    log = (
        "replica 0: error, exit code 1: ended. Last lines of its log:\n step 7\n ValueError: x \n\n"
    )
    reasons = ["", "stopped by olga", log, "ended. Last lines of its log:\n", f"{log} {log}"]
    result = page.evaluate(f"(all) => {{ {SOURCE}\n return all.map(inShort); }}", reasons)
    assert result == [formats.in_short(reason) for reason in reasons]
    assert result[2] == "replica 0: error, exit code 1: ended. ValueError: x"


def test_ticks_of_an_axis_have_distinct_labels(page: Page) -> None:
    for given, expected in AXES.items():
        text, *ticks = given.split()
        call = f"() => {{ {SOURCE}\n return axis([{', '.join(ticks)}], {text}); }}"
        assert page.evaluate(call) == expected, given


def test_ticks_of_an_axis_have_dates(page: Page) -> None:
    page.clock.set_fixed_time(datetime(2026, 11, 23, 15, tzinfo=UTC))
    for given, expected in TICKS.items():
        ticks = f"{given.split()}.map((text) => Date.parse(text) / 1000)"
        assert page.evaluate(f"() => {{ {SOURCE}\n return timeTicks({ticks}); }}") == expected
    unknown = "[clock(null), clock(NaN), clock(''), when('soon'), clock(undefined)]"
    assert page.evaluate(f"() => {{ {SOURCE}\n return {unknown}; }}") == ["–"] * 5
    other_day = "[clock('2026-11-20T08:00:05'), clock('2026-11-20T08:00:05', { seconds: true })]"
    assert page.evaluate(f"() => {{ {SOURCE}\n return {other_day}; }}") == [
        "Nov 20, 08:00",
        "Nov 20, 08:00:05",
    ]
