"""Rates that earlier runs measured."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.protocol.workload import ByteGPTWorkload
from runs.models import Replica
from runs.submit.throughput_history import known_rates
from tests.browser import seed

pytestmark = pytest.mark.django_db


def run(rate: float | None, **workload: Any) -> None:
    made = seed.run(seed.user("olga", "operator"), committed=0, replicas=1)
    made.workload = ByteGPTWorkload(**{"size": "demo"} | workload).to_dict()
    made.save()
    Replica.objects.filter(run=made).update(tokens_per_s=rate)


def test_the_median_of_the_same_model_on_the_same_hardware() -> None:
    for rate in (100.0, 5000.0, 120.0):
        run(rate)
    assert known_rates(ByteGPTWorkload(size="demo").to_dict()) == {("local", "cpu"): 120.0}


def test_other_data_is_the_same_model_and_another_size_is_not() -> None:
    run(100.0, data="file:///books")
    run(7.0, size="large")
    assert known_rates(ByteGPTWorkload(size="demo").to_dict()) == {("local", "cpu"): 100.0}


@pytest.mark.parametrize("rate", [None, 0.0])
def test_a_replica_that_never_trained_has_no_rate(rate: float | None) -> None:
    run(rate)
    assert known_rates(ByteGPTWorkload(size="demo").to_dict()) == {}


def test_one_query_for_any_number_of_replicas(django_assert_num_queries: Any) -> None:
    for _ in range(5):
        run(100.0)
    with django_assert_num_queries(1):
        known_rates(ByteGPTWorkload(size="demo").to_dict())
