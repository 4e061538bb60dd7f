"""System checks: invalid settings, and settings that a public server must have."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import Tags, run_checks

from dashboard import checks
from tests.matrix import matrix

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def production(tmp_path: Path) -> dict[str, str]:
    """The environment of a server as documented in docs/operations.md."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ARCHIPELAGO_") and name not in ("DATABASE_URL", "REDIS_URL")
    }
    return kept | {
        "ARCHIPELAGO_VAR": str(tmp_path / "var"),
        "ARCHIPELAGO_SECRET_KEY": "s0me-Words_" * 6,
        "ARCHIPELAGO_CREDENTIALS_KEY": base64.urlsafe_b64encode(bytes(range(32))).decode(),
        "ARCHIPELAGO_DEPLOYMENT": "islands",
        "ARCHIPELAGO_ALLOWED_HOSTS": "archipelago.example",
        "ARCHIPELAGO_TRUSTED_ORIGINS": "https://archipelago.example",
        "ARCHIPELAGO_HTTPS": "true",
        "ARCHIPELAGO_RENDEZVOUS": "s3://islands/runs",
        "DATABASE_URL": "postgres://archipelago:word@db:5432/archipelago",
        "REDIS_URL": "redis://:word@broker:6379/0",
    }


def deploy_check(env: dict[str, str]) -> tuple[int, set[str], str]:
    """Exit status of ``manage.py check --deploy``, the reported ids, and its output."""
    done = subprocess.run(
        [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"],
        cwd=REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
    )
    output = done.stdout + done.stderr
    return done.returncode, set(re.findall(r"\(([a-z_]+\.[EW]\d+)\)", output)), output


def test_a_production_environment_passes(production: dict[str, str]) -> None:
    assert deploy_check(production)[:2] == (0, set())


@pytest.mark.slow
def test_missing_settings_are_reported(production: dict[str, str]) -> None:
    bare = {
        name: value
        for name, value in production.items()
        if name == "ARCHIPELAGO_VAR" or not name.startswith(("ARCHIPELAGO_", "DATABASE", "REDIS"))
    }
    status, ids, output = deploy_check(bare)
    assert status == 1
    ours = {id for id in ids if id.startswith("archipelago.")}
    assert ours == {
        f"archipelago.{id}"
        for id in ("E101", "E103", "W104", "W105", "W106", "W107", "W108", "W109")
    }
    for name in production.keys() - bare.keys() - {"ARCHIPELAGO_TRUSTED_ORIGINS"}:
        assert name in output, f"{name} is not named"


@pytest.mark.slow
def test_debug_and_a_short_secret_key_are_reported_by_django(production: dict[str, str]) -> None:
    wrong = {"ARCHIPELAGO_DEBUG": "1", "ARCHIPELAGO_SECRET_KEY": "short"}
    assert deploy_check(production | wrong)[1] == {"security.W018", "security.W009"}


@pytest.mark.parametrize(
    ("name", "value", "id", "result"),
    [
        ("LOG_FORMAT", "xml", "E001", "'xml'"),
        ("REAPER_POLICY", "kill", "E002", "'kill'"),
        ("PENDING_TIMEOUT_S", -1.0, "E010", "found -1.0"),
        ("PENDING_TIMEOUT_S", float("nan"), "E010", "found nan"),
        ("VAR_DIR", Path("/proc/archipelago"), "E003", "/proc/archipelago"),
        ("REDIS_URL", "http://h/0", "E004", "redis://"),
        ("DEFAULT_RENDEZVOUS", "/srv/runs", "E005", "'/srv/runs'"),
    ],
)
def test_invalid_settings_end_the_process_at_start(
    settings: Any, name: str, value: Any, id: str, result: str
) -> None:
    checks.at_start()
    setattr(settings, name, value)
    (message,) = run_checks(tags=[checks.TAG])
    assert message.id == f"archipelago.{id}"
    assert result in message.msg
    with pytest.raises(SystemExit, match=f"archipelago.{id}"):
        checks.at_start()


def test_the_administration_passes_the_checks_of_django() -> None:
    """A process without pages does not load it, so its checks pass there."""
    import dashboard.urls  # noqa: F401

    assert run_checks(tags=[Tags.admin]) == []


def test_wildcard_hosts_are_rejected(settings: Any) -> None:
    settings.ALLOWED_HOSTS = ["*"]
    ids = {m.id for m in run_checks(tags=[checks.TAG], include_deployment_checks=True)}
    assert "archipelago.E102" in ids


def test_behind_tls_missing_settings_are_logged(
    settings: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ARCHIPELAGO_SECRET_KEY", raising=False)
    checks.at_start()
    assert not caplog.records
    settings.SECURE_SSL_REDIRECT = True
    checks.at_start()
    assert any("archipelago.W104" in record.getMessage() for record in caplog.records)


@matrix("service", ["web", "worker", "beat"], fast=("beat",))
def test_each_service_reports_invalid_settings(production: dict[str, str], service: str) -> None:
    from dashboard.server import commands

    command = {
        "web": commands.web(host="127.0.0.1", port=1),
        "worker": commands.worker(),
        "beat": commands.beat(),
    }[service]
    done = subprocess.run(
        [sys.executable, *command[1:]],
        cwd=REPOSITORY,
        env=production | {"ARCHIPELAGO_REAPER": "kill"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode != 0
    assert "ARCHIPELAGO_REAPER: expected cancel or report, found 'kill'" in done.stderr


def test_every_check_is_documented() -> None:
    reported = (REPOSITORY / "docs" / "operations.md").read_text()
    source = Path(checks.__file__).read_text()
    for id in set(re.findall(r'"([EW]\d{3})"', source)):
        assert f"`{id}`" in reported, f"archipelago.{id} is not in docs/operations.md"
