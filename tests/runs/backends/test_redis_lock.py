"""Leases in Redis."""

from __future__ import annotations

from typing import Any

import pytest

from runs import live_stream
from runs.backends import shared_breakers
from runs.backends.redis_lock import TTL_S, lease


@pytest.fixture
def redis(valkey: str, settings: Any) -> Any:
    settings.REDIS_URL = valkey
    return live_stream.client()


def test_a_lease_left_behind_before_the_clock_was_set_back_ends_after_its_own_time(
    redis: Any,
) -> None:
    """Its end is a time of the wall clock, which is now an hour away."""
    key = "archipelago:lease:of a killed worker"
    redis.set(key, "token", px=3_600_000)
    with lease("of a killed worker") as held:
        assert not held
    assert 0 < redis.pttl(key) <= TTL_S * 1000


def test_a_lease_that_is_held_is_neither_given_nor_made_longer(redis: Any) -> None:
    with lease("busy") as first:
        redis.pexpire("archipelago:lease:busy", 5000)
        with lease("busy") as second:
            assert (first, second) == (True, False)
            assert redis.pttl("archipelago:lease:busy") <= 5000
    with lease("busy") as again:
        assert again


def test_a_slot_of_a_killed_process_ends_after_its_own_time(redis: Any) -> None:
    for number in range(shared_breakers.SLOTS):
        redis.set(shared_breakers._slot("a place", number), 0.0, px=3_600_000)
    with shared_breakers.slot("a place") as free:
        assert not free
    for number in range(shared_breakers.SLOTS):
        assert redis.pttl(shared_breakers._slot("a place", number)) <= shared_breakers.SLOT_S * 1000
