"""Conditions on columns."""

from __future__ import annotations

import uuid

import pytest

from runs.models import ReplicaPool, Run
from runs.queries.lookups import AmongIds
from tests.browser import seed

pytestmark = pytest.mark.django_db


def test_rows_are_those_of_the_ids_alone() -> None:
    owner = seed.user("olga", "operator")
    first, second, other = (seed.run(owner, committed=0, replicas=1) for _ in range(3))
    wanted = [first.pk, second.pk, uuid.uuid4()]
    pools = ReplicaPool.objects.filter(AmongIds("run", wanted))
    assert {pool.run_id for pool in pools} == {first.pk, second.pk}
    assert set(Run.objects.exclude(AmongIds("id", wanted))) == {other}
    assert not Run.objects.filter(AmongIds("id", [])).exists()
