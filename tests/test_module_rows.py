"""Rows that the tests of a module share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import Group

from tests.module_rows import Unblock, open_transaction

pytestmark = pytest.mark.django_db
made: list[Group] = []


@pytest.fixture(scope="module")
def seeded(module_rows: Unblock) -> Group:
    with module_rows():
        made.append(Group.objects.create(name="shared"))
    return made[-1]


@pytest.fixture
def group(db: None, seeded: Group) -> Group:
    return copy.deepcopy(seeded)


@pytest.mark.parametrize("time", ["first", "second"])
def test_each_test_finds_the_rows_as_they_were_written(group: Group, time: str) -> None:
    assert len(made) == 1
    assert group.name == "shared"
    group.name = time
    group.save()
    Group.objects.create(name="of one test")
    assert {"shared", "of one test"}.isdisjoint(
        Group.objects.exclude(name="of one test").values_list("name", flat=True)
    )


def test_rows_end_with_the_transaction(db: None, django_db_blocker: Any) -> None:
    with open_transaction([], None, django_db_blocker) as unblock, unblock():
        Group.objects.create(name="gone")
    assert not Group.objects.filter(name="gone").exists()


def test_a_module_with_transactions_is_refused(request: Any, django_db_blocker: Any) -> None:
    def item(mark: Callable[..., Any]) -> Any:
        marks = [mark.mark]  # type: ignore[attr-defined]
        return SimpleNamespace(
            module=request.module,
            name="test_with_transactions",
            iter_markers=lambda: marks,
            get_closest_marker=lambda name: marks[0] if name == "django_db" else None,
        )

    other = item(pytest.mark.django_db(transaction=True))
    other.module = None
    usual = item(pytest.mark.django_db)
    with open_transaction([other, usual], request.module, django_db_blocker):
        pass
    refused = item(pytest.mark.django_db(transaction=True))
    with (
        pytest.raises(ValueError, match="found test_with_transactions"),
        open_transaction([refused], request.module, django_db_blocker),
    ):
        pass
