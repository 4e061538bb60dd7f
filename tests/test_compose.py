"""``docker-compose.yml`` follows the Compose schema and agrees with the rest of the repository.

No container engine is available, so the file is checked as text.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboard.server import commands

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = ROOT / "docker-compose.yml"
ONE_OFF = ("migrate", "bucket")
"""Services that exit before the others start."""


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    document: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
    return document


def test_it_follows_the_compose_schema() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "check_jsonschema"),
            *("--builtin-schema", "vendor.compose-spec", str(COMPOSE)),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("web", commands.web(host="0.0.0.0", port=8000)),
        ("control", commands.control()),
        ("ingest", commands.ingest()),
        ("worker", commands.worker()),
        ("beat", commands.beat()),
    ],
)
def test_a_service_runs_the_supervisors_command(
    services: dict[str, dict[str, Any]], name: str, command: list[str]
) -> None:
    assert shlex.split(services[name]["command"]) == command


def test_the_image_runs_the_web_services_command() -> None:
    text = (ROOT / "docker" / "web.Dockerfile").read_text().replace("\\\n", "")
    (arguments,) = re.findall(r"^CMD \[(.*)\]$", text, re.MULTILINE)
    assert re.findall(r'"([^"]*)"', arguments) == commands.web(host="0.0.0.0", port=8000)


def test_every_service_exists_and_waits_for_its_dependencies(
    services: dict[str, dict[str, Any]],
) -> None:
    started = {"web", "control", "ingest", "worker", "beat"}
    assert set(services) == {"postgres", "valkey", "store", *ONE_OFF} | started
    for name, service in services.items():
        for needed in service.get("depends_on", {}):
            condition = service["depends_on"][needed]["condition"]
            expected = "completed_successfully" if needed in ONE_OFF else "healthy"
            assert condition == f"service_{expected}", (name, needed)
            if expected == "healthy":
                assert "healthcheck" in services[needed], needed


def variables_of_the_example() -> set[str]:
    text = (ROOT / "docker" / "env.example").read_text()
    return set(re.findall(r"^#?([A-Z0-9_]+)=", text, re.MULTILINE))


def test_secrets_come_from_variables_of_the_example() -> None:
    text = COMPOSE.read_text()
    assert set(re.findall(r"\$\{([A-Z0-9_]+)", text)) <= variables_of_the_example()
    for name in re.findall(r"\$\{([A-Z_]*(?:PASSWORD|SECRET_KEY))([^}]*)", text):
        assert name[1] == ":?set it in .env", name


@pytest.mark.parametrize("dockerfile", ["web", "replica"])
def test_an_image_copies_existing_files_that_dockerignore_allows(dockerfile: str) -> None:
    allowed = (ROOT / ".dockerignore").read_text().split()
    text = (ROOT / "docker" / f"{dockerfile}.Dockerfile").read_text()
    for source in re.findall(r"^COPY (\S+) ", text, re.MULTILINE):
        assert (ROOT / source).exists()
        assert f"!{source.split('/')[0]}" in allowed


@pytest.mark.parametrize("name", ["web", "control", "ingest", "worker", "beat", "migrate"])
def test_every_variable_of_the_env_file_reaches_the_service(
    services: dict[str, dict[str, Any]], name: str
) -> None:
    assert services[name]["env_file"] == [".env"]


def test_files_that_variables_name_are_in_the_mounted_folder(
    services: dict[str, dict[str, Any]],
) -> None:
    text = (ROOT / "docker" / "env.example").read_text()
    for path in re.findall(r"^#?[A-Z_]+=(/\S+)", text, re.MULTILINE):
        assert path.startswith("/etc/archipelago/")
    assert (ROOT / "docker" / "config").is_dir()
    for name in ("web", "control", "ingest", "worker", "beat"):
        assert "./docker/config:/etc/archipelago:ro" in services[name]["volumes"]


def test_plain_http_is_published_on_the_loopback_only(
    services: dict[str, dict[str, Any]],
) -> None:
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert published == ["${ARCHIPELAGO_HOST:-127.0.0.1}:${ARCHIPELAGO_PORT:-8000}:8000"]


def test_the_worker_that_runs_local_replicas_has_torch(
    services: dict[str, dict[str, Any]],
) -> None:
    assert services["worker"]["build"]["args"]["TORCH"] == "${WORKER_TORCH-2.13.0}"


def test_settings_read_every_variable_of_the_web_service(
    services: dict[str, dict[str, Any]],
) -> None:
    settings = (ROOT / "dashboard" / "settings.py").read_text()
    for name in services["web"]["environment"]:
        assert name.startswith("AWS_") or f'"{name}"' in settings, name
