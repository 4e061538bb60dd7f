"""Compared runs and saved views on the command line, against a live server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.utils import timezone

from runs.models import Board, Run, RunView, SavedView
from tests.browser import seed

pytestmark = pytest.mark.django_db(transaction=True)


def test_compared_runs_and_saved_views(call: Callable[..., Any], signed_in: str) -> None:
    owner = seed.user("owner", "operator")
    first, second = (
        seed.run(owner, name=name, replicas=1, committed=3) for name in ("First", "Second")
    )
    Run.objects.filter(pk=second.pk).update(
        group_settings={**second.group_settings, "outer_lr": 0.55}
    )

    found = call("compare", "First", "Second", "First")
    assert found.code == 0, found.err
    head, *results, blank, settings, outer_lr = found.out.splitlines()
    assert head.split() == [
        *("RUN", "NAME", "STATE", "EVAL", "BEST", "TRAIN", "TOKENS", "TIME", "TOKENS/S"),
        *("GOODPUT", "TRAFFIC", "COST"),
    ]
    assert [line.split()[1] for line in results] == ["First", "Second"]
    assert (blank, settings.split()) == ("", ["SETTING", "First", "Second"])
    assert outer_lr.split()[0] == "settings.outer_lr"
    assert outer_lr.endswith("0.55")
    answer = json.loads(call("compare", "First", "Second", "--json").out)
    assert [run["id"] for run in answer["runs"]] == [str(first.pk), str(second.pk)]
    assert "no settings differ" in call("compare", "First").out
    assert call("compare", "nothing").code == 5

    save = ("views", "save", "Paper", "-q", "tag:paper", "--columns", "name,cost")
    assert call(*save, "--sort=-cost").out == ("Paper  q=tag:paper&sort=-cost&columns=name,cost\n")
    assert call("views", "save", "paper", "--group-by", "owner", "--shared").code == 0
    view = SavedView.objects.get()
    assert (view.name, view.query, view.group, view.shared) == ("paper", "", "owner", True)
    [row] = json.loads(call("views", "ls", "--json").out)
    assert json.loads(call("views", "show", str(view.pk), "--json").out) == row
    shown = call("views", "show", "Paper")
    assert "group" in shown.out
    assert shown.err.strip() == f"{signed_in}/?group=owner"
    assert "expected" in call("views", "save", "x", "-q", "stat:running").err
    assert call("views", "delete", "paper").out == "paper deleted\n"
    assert "found none that matches 'paper'" in call("views", "show", "paper").err

    layout = ("--panels", "loss.l,-cosine", "--smooth", "0.5", "--log", "y", "--no-clip")
    assert call("run-views", "save", "Wide", *layout).code == 0
    assert call("run-views", "save", "wide", *layout, "--x", "tokens").code == 0
    panels = RunView.objects.get()
    assert (panels.panels, panels.x, panels.smooth, panels.clip) == (
        "loss.l,-cosine",
        "tokens",
        0.5,
        False,
    )
    assert "loss.l,-cosine" in call("run-views", "ls").out
    assert "tokens" in call("run-views", "show", "wide").out
    assert call("run-views", "delete", "wide").out == "wide deleted\n"
    assert not RunView.objects.exists()


@pytest.mark.parametrize(
    ("group", "add"),
    [
        ("views", lambda user, **of: SavedView.objects.create(owner=user, **of)),
        ("run-views", lambda user, **of: RunView.objects.create(owner=user, **of)),
        ("boards", lambda user, **of: Board.objects.create(owner=user, **of)),
    ],
)
def test_the_name_of_another_user_deletes_nothing(
    call: Callable[..., Any], signed_in: str, group: str, add: Callable[..., Any]
) -> None:
    owner, admin = seed.user("vera", "viewer"), seed.user("owner", "admin")
    at = {"name": "Paper", "changed_at": timezone.now()}
    shared = add(owner, **at, shared=True)
    refused = call(group, "delete", "paper")
    assert refused.code != 0
    assert f"of vera: expected its id, {shared.pk}, to delete it" in refused.err
    own = add(admin, **at)
    assert call(group, "delete", "paper").code == 0
    kind = type(shared).objects
    assert list(kind.values_list("pk", flat=True)) == [shared.pk]
    assert own.pk != shared.pk
    assert call(group, "delete", str(shared.pk)).code == 0
    assert not kind.exists()
