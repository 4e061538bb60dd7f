"""The commands of boards against a live server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from runs.models import Board
from tests.browser import seed

pytestmark = pytest.mark.django_db(transaction=True)


def test_save_list_show_and_delete(call: Callable[..., Any], signed_in: str) -> None:
    run = seed.run(seed.user("owner", "operator"), name="First", replicas=1, committed=3)
    made = call(
        "boards", "save", "Paper", "--run", "First", "--panel", "loss,x=wall,smooth=0.5,log"
    )
    assert made.code == 0, made.err
    board = Board.objects.get()
    assert board.runs == [str(run.pk)]
    assert board.panels == [{"metric": "loss", "x": "wall", "smooth": 0.5, "log": True}]
    assert call("boards", "save", "paper", "-q", "is:active", "--shared").code == 0
    [row] = json.loads(call("boards", "ls", "--json").out)
    assert (row["name"], row["query"], row["shared"]) == ("paper", "is:active", True)
    assert "is:active" in call("boards", "ls").out
    assert "First" in call("boards", "show", "Paper").out
    assert json.loads(call("boards", "show", str(row["id"]), "--json").out)["board"] == row
    for panel, why in (("loss,y=1", "found 'y=1'"), ("loss,smooth=x", "found 'x'")):
        assert why in call("boards", "save", "x", "-q", "is:active", "--panel", panel).err
    assert call("boards", "delete", "paper").out == "paper deleted\n"
    assert "found none that matches 'paper'" in call("boards", "show", "paper").err
