"""Suggested names."""

from __future__ import annotations

import pytest

from runs.submit.names import NAME_LENGTH, next_free


@pytest.mark.parametrize(
    ("name", "taken", "suggested"),
    [
        ("Demo", (), "Demo"),
        ("Demo", ("Other",), "Demo"),
        ("Demo", ("Demo",), "Demo 2"),
        ("Demo", ("Demo", "Demo 2", "Demo 4"), "Demo 3"),
        ("Demo 7", ("Demo 7",), "Demo 8"),
        ("Demo (copy)", ("Demo (copy)",), "Demo (copy 2)"),
        ("Demo (copy 2)", ("Demo (copy 2)", "Demo (copy 3)"), "Demo (copy 4)"),
        ("2", ("2",), "2 2"),
    ],
)
def test_the_next_free_name_of_a_series(name: str, taken: tuple[str, ...], suggested: str) -> None:
    assert next_free(name, taken) == suggested


def test_a_long_name_keeps_its_number() -> None:
    name = "x" * NAME_LENGTH
    assert next_free(name, {name}) == "x" * (NAME_LENGTH - 2) + " 2"
