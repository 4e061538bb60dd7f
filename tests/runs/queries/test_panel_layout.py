"""Layouts of a run's panels: what the address holds is stored, anything else is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from runs.exceptions import InvalidRun
from runs.models import RunView
from runs.queries.panel_layout import MOST_PANELS, PanelLayout

FULL = "loss.l,-cosine,m:grad_norm.s!,m:eval-a.b.m"


def test_a_layout_is_read_from_an_address_and_written_to_it() -> None:
    values = {"panels": FULL, "x": "tokens", "smooth": "0.9", "log": "xy", "clip": "0"}
    layout = PanelLayout.of(values | {"from": "3", "tab": "overview"})
    assert layout == PanelLayout(panels=FULL, x="tokens", smooth=0.9, log="xy", clip=False)
    assert str(layout) == f"?panels={FULL}&x=tokens&smooth=0.9&log=xy&clip=0"
    assert str(PanelLayout.of({})) == "?"
    assert str(PanelLayout(smooth=0.0, clip=True)) == "?smooth=0&clip=1"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"panels": "loss"}, "panels"),
        ({"panels": "loss.l,"}, "panels"),
        ({"panels": "loss.xl"}, "panels"),
        ({"panels": '"><script>.s'}, "panels"),
        ({"panels": "loss.l\n"}, "panels"),
        ({"panels": "loss.l,-loss"}, "panels"),
        ({"panels": "loss.l!,loss.l"}, "panels"),
        ({"panels": ",".join(f"m:{i}.s" for i in range(MOST_PANELS + 1))}, "panels"),
        ({"panels": ",".join("m:" + "x" * 90 + f"{i}.s" for i in range(50))}, "panels"),
        ({"x": "money"}, "x"),
        ({"smooth": "much"}, "smooth"),
        ({"smooth": "nan"}, "smooth"),
        ({"smooth": "1"}, "smooth"),
        ({"log": "yx"}, "log"),
    ],
)
def test_anything_else_is_refused_by_name(values: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidRun) as caught:
        PanelLayout.of(values)
    assert caught.value.field == field
    assert "expected" in caught.value.message


@pytest.mark.parametrize("stored", [{"panels": "of another version"}, {"x": ""}, {"smooth": 7.0}])
def test_a_stored_layout_that_is_not_read_is_the_usual_one(stored: dict[str, Any]) -> None:
    view = RunView(**{"panels": FULL, "x": "step"} | stored)
    assert PanelLayout.of_view(view) == PanelLayout()
