"""``docs/reference/library.md`` names the whole public interface."""

from __future__ import annotations

from pathlib import Path

import pytest

import diloco

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "library.md"


@pytest.mark.parametrize("name", diloco.__all__)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    text = PAGE.read_text()
    assert f"`{name}`" in text or f"`{name}(" in text


def test_every_public_member_of_a_group_is_in_the_reference() -> None:
    text = PAGE.read_text()
    members = [name for name in vars(diloco.Group) if not name.startswith("_")]
    assert "step" in members
    assert [name for name in members if f"`Group.{name}" not in text] == []
