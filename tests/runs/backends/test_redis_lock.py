"""Leases in Redis."""

from __future__ import annotations

from typing import Any

import pytest

from runs import live_stream
from runs.backends import shared_breakers
from runs.backends.redis_lock import TTL_S, lease
from tests.emulators.serving import wait_until


@pytest.fixture
def redis(valkey: str, settings: Any) -> Any:
    settings.REDIS_URL = valkey
    return live_stream.client()


def test_abandoned_lease_expires_although_the_clock_was_set_back(
    redis: Any,
) -> None:
    """Its expiry is a wall-clock time that is now an hour away."""
    key = "archipelago:lease:of a killed worker"
    redis.set(key, "token", px=3_600_000)
    with lease("of a killed worker") as held:
        assert not held
    assert 0 < redis.pttl(key) <= TTL_S * 1000


def test_held_lease_is_neither_taken_nor_extended(redis: Any) -> None:
    with lease("busy", ttl_s=600) as first:
        redis.pexpire("archipelago:lease:busy", 15_000)
        with lease("busy") as second:
            assert (first, second) == (True, False)
            assert redis.pttl("archipelago:lease:busy") <= 15_000
    with lease("busy") as again:
        assert again


def test_a_lease_whose_answer_is_lost_is_released(
    redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = type(redis).eval
    lost = [TimeoutError("no answer within 2 s")]

    def once(client: Any, *arguments: Any) -> Any:
        answer = answered(client, *arguments)
        if lost:
            raise lost.pop()
        return answer

    monkeypatch.setattr(type(redis), "eval", once)
    with pytest.raises(TimeoutError), lease("lost", ttl_s=3600.0):
        pass
    wait_until(lambda: not redis.exists("archipelago:lease:lost"), "the lease is not released")


def test_slot_of_a_killed_process_expires(redis: Any) -> None:
    for number in range(shared_breakers.SLOTS):
        redis.set(shared_breakers._slot("a place", number), 0.0, px=3_600_000)
    with shared_breakers.slot("a place") as free:
        assert not free
    for number in range(shared_breakers.SLOTS):
        assert redis.pttl(shared_breakers._slot("a place", number)) <= shared_breakers.SLOT_S * 1000
