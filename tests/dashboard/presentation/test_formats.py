"""Formatting of numbers."""

from __future__ import annotations

import math

import pytest

from dashboard.presentation import formats


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (9_999, "9,999"),
        (12_345, "12.3k"),
        (999_999, "1.00M"),
        (1_966_080, "1.97M"),
        (59_000_000, "59.0M"),
        (2.5e9, "2.50B"),
        (math.nan, "–"),
    ],
)
def test_count(value: float | None, text: str) -> None:
    assert formats.count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0 B"),
        (999, "999 B"),
        (999_999, "1.00 MB"),
        (1_950_000, "1.95 MB"),
        (999_400_000, "999 MB"),
        (999_600_000, "1.00 GB"),
        (80e9, "80.0 GB"),
        (999.6e9, "1.00 TB"),
        (2.345e12, "2.35 TB"),
        (999.4e12, "999 TB"),
        (1_888e12, "1.89 PB"),
        (999.4e15, "999 PB"),
    ],
)
def test_size(value: float | None, text: str) -> None:
    assert formats.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.031, "31 ms"),
        (0.25, "0.25 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1m 00s"),
        (200, "3m 20s"),
        (3_599.6, "1h 00m"),
        (7_500, "2h 05m"),
        (90_000, "1d 01h"),
        (-3, "0 ms"),
    ],
)
def test_duration(value: float | None, text: str) -> None:
    assert formats.duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (2.31249, "2.312"), (math.nan, "NaN"), (math.inf, "∞"), (12_345.6, "12.3k")],
)
def test_loss(value: float | None, text: str) -> None:
    assert formats.loss(value) == text


def test_age_and_percent() -> None:
    assert [formats.age(s) for s in (0, 12, 61, 3_700, 90_000, None)] == [
        "now",
        "12 s",
        "1 min",
        "1 h",
        "1 d",
        "–",
    ]
    assert [formats.percent(v) for v in (0.881, 0.031, 1.0, None)] == ["88%", "3.1%", "100%", "–"]
