"""Files of the server are readable only by its own account."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dashboard.checks import check_deployment
from dashboard.security import private_files
from executors.local.user import SETTING

ROOT = Path(__file__).resolve().parents[3]


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_permissions_of_an_existing_state_folder_are_tightened(
    tmp_path: Path, settings: Any
) -> None:
    state = tmp_path / "var"
    (state / "logs").mkdir(parents=True)
    for name in ("archipelago.sqlite3", "logs/web.log"):
        (state / name).touch(mode=0o644)
    state.chmod(0o755)
    settings.VAR_DIR = state
    assert "archipelago.W111" in [message.id for message in check_deployment(None)]
    changed = private_files.tighten(state)
    assert {path.name for path in changed} == {"var", "archipelago.sqlite3", "web.log"}
    assert mode(state) == 0o700
    assert mode(state / "archipelago.sqlite3") == mode(state / "logs/web.log") == 0o600
    assert private_files.tighten(state) == []
    assert "archipelago.W111" not in [message.id for message in check_deployment(None)]


def test_with_an_account_for_replicas_the_folder_can_be_traversed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTING, "nobody")
    state = tmp_path / "var"
    state.mkdir()
    state.chmod(0o755)
    private_files.tighten(state)
    assert mode(state) == 0o711


@pytest.mark.processes
@pytest.mark.slow
def test_a_command_creates_private_files(tmp_path: Path) -> None:
    """Database and keys, with any umask of the shell."""
    state = tmp_path / "var"
    env = {**os.environ, "ARCHIPELAGO_VAR": str(state)}
    env.pop("DATABASE_URL", None)
    code = (
        "import os, runpy, sys; os.umask(0o022); "
        "sys.argv = 'manage.py migrate -v0 contenttypes'.split(); "
        "runpy.run_path('manage.py', run_name='__main__')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True)
    assert mode(state) == 0o700
    files = [path for path in state.rglob("*") if path.is_file()]
    assert "archipelago.sqlite3" in {path.name for path in files}
    assert {path.name: mode(path) & 0o077 for path in files} == {path.name: 0 for path in files}
