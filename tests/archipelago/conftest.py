"""A live server, a login file per test, and the command line as a fixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from archipelago.cli import main
from tests.browser import seed


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _own_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ARCHIPELAGO_URL", "ARCHIPELAGO_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ARCHIPELAGO_LOGIN", str(tmp_path / "config" / "login.json"))
    monkeypatch.setenv("no_proxy", "*")
    # Without a broker: waiting for it would take most of the time.
    monkeypatch.setattr("runs.task_queue._send", lambda *_: None)


@pytest.fixture
def token_of(db: None) -> Callable[..., str]:
    from runs.actions import api_tokens

    def make(name: str = "owner", role: str = "operator", *scopes: str) -> str:
        _, text = api_tokens.issue(
            seed.user(name, role), name="a test", scopes=list(scopes or ("read", "operate"))
        )
        return text

    return make


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., CommandResult]:
    def run(*arguments: str) -> CommandResult:
        capsys.readouterr()
        try:
            code = main(arguments)
        except SystemExit as error:
            code = int(error.code or 0)
        result = capsys.readouterr()
        return CommandResult(code=code, out=result.out, err=result.err)

    return run


@pytest.fixture
def signed_in(
    live_server: Any, token_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Sign in as the owner of the seeded runs. Yields the server's URL."""
    monkeypatch.setenv("ARCHIPELAGO_URL", live_server.url)
    monkeypatch.setenv("ARCHIPELAGO_TOKEN", token_of())
    yield live_server.url
