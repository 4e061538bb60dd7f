from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from dashboard.server import broker
from tests.servers import running_valkey


def test_the_broker_requires_its_password(valkey: str) -> None:
    client = redis.Redis.from_url(valkey)
    assert client.ping()
    port = client.connection_pool.connection_kwargs["port"]
    stranger = redis.Redis(port=port, retry=Retry(NoBackoff(), 0))
    with pytest.raises(redis.exceptions.AuthenticationError):
        stranger.ping()


def test_data_and_address_survive_a_restart(tmp_path: Path) -> None:
    with running_valkey(tmp_path) as first:
        redis.Redis.from_url(first).xadd("stream", {"n": 1})
    with running_valkey(tmp_path) as second:
        assert second == first
        assert redis.Redis.from_url(second).xlen("stream") == 1


def test_a_taken_port_is_replaced(tmp_path: Path, valkey: str) -> None:
    taken = int(redis.Redis.from_url(valkey).connection_pool.connection_kwargs["port"])
    (tmp_path / "broker.json").write_text(json.dumps({"port": taken, "password": "x"}))
    assert broker.prepare(tmp_path).port != taken


def test_another_server_on_the_port_is_reported(tmp_path: Path, valkey: str) -> None:
    port = int(redis.Redis.from_url(valkey).connection_pool.connection_kwargs["port"])
    with pytest.raises(broker.BrokerError, match="another server listens"):
        broker.Broker(folder=tmp_path, port=port, password="wrong").ready()


def test_the_password_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    broker.prepare(tmp_path)
    for name in ("broker.json", "valkey.conf"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0


def test_the_check_of_an_external_broker_hides_its_password(valkey: str) -> None:
    broker.check(valkey)
    port = redis.Redis.from_url(valkey).connection_pool.connection_kwargs["port"]
    for url in (f"redis://:wrong@127.0.0.1:{port}/0", "redis://:wrong@127.0.0.1:1/0", "smoke://x"):
        with pytest.raises(broker.BrokerError, match="REDIS_URL") as refused:
            broker.check(url)
        assert ":wrong" not in str(refused.value)
