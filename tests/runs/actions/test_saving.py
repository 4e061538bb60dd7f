"""Rows that two requests change at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User

from diloco.trackers.opening import Destination
from runs.actions.budgets import save_budget
from runs.actions.trackers import save_tracker
from runs.actions.webhooks import save_webhook
from runs.exceptions import InvalidRun

pytestmark = pytest.mark.django_db


def budget(actor: User, row: Any = None) -> Any:
    values = {"scope": "owner", "name": actor.username, "period": "month", "amount_usd": 10.0}
    return save_budget(**values, actor=actor, budget=row)


def tracker(actor: User, row: Any = None) -> Any:
    place = Destination(kind="mlflow", server="http://127.0.0.1:5000", project="runs")
    return save_tracker("metrics", place, secrets={}, actor=actor, tracker=row)


def webhook(actor: User, row: Any = None) -> Any:
    values = {"name": "chat", "url": "http://127.0.0.1:8080/", "kinds": ["stalled"]}
    return save_webhook(**values, actor=actor, hook=row)[0]


@pytest.mark.parametrize("save", [budget, tracker, webhook])
def test_a_row_that_was_deleted_meanwhile_is_not_created_again(save: Callable[..., Any]) -> None:
    actor = User.objects.create_user("ada", is_superuser=True)
    row = save(actor)
    type(row).objects.all().delete()
    with pytest.raises((InvalidRun, ValueError), match="has been deleted meanwhile"):
        save(actor, row)
    assert not type(row).objects.exists()


@pytest.mark.parametrize("save", [budget, tracker, webhook])
def test_the_second_of_two_equal_rows_is_refused(save: Callable[..., Any]) -> None:
    actor = User.objects.create_user("ada", is_superuser=True)
    row = save(actor)
    with pytest.raises((InvalidRun, ValueError), match=r"another one|no other|unused"):
        save(actor)
    assert type(row).objects.count() == 1
