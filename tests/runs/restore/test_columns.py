"""Values of the journal as columns: a wrong one is refused with a message of bounded length."""

from __future__ import annotations

import pytest

from runs.exceptions import ActionRefused
from runs.models import Run
from runs.restore.columns import columns

LONG = "x" * 70_000


@pytest.mark.parametrize("name", ["cancel_at", "state", "name"])
def test_a_long_value_is_abridged(name: str) -> None:
    with pytest.raises(ActionRefused, match=f"^journal: Run {name}: ") as refused:
        columns(Run, {name: LONG}, (name,))
    assert len(str(refused.value)) < 600


def test_a_short_value_is_quoted_with_the_expected_format() -> None:
    with pytest.raises(ActionRefused, match=r"“soon”.* YYYY-MM-DD HH:MM"):
        columns(Run, {"cancel_at": "soon"}, ("cancel_at",))
