"""Sign-in of the client: where the token is stored, and which server it is sent to."""

from __future__ import annotations

import io
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archipelago.client import Client
from tests.browser import seed

pytestmark = pytest.mark.django_db(transaction=True)

Call = Callable[..., Any]
DOCUMENT = 'name = "Sent"\n[settings]\nwarmup_steps = 5\n[[pools]]\ncount = 2\n'


@pytest.fixture
def run(signed_in: str) -> Any:
    return seed.run(seed.user("owner", "operator"), committed=3, replicas=2, name="First run")


def test_login_stores_the_token_in_a_private_file(
    call: Call, live_server: Any, token_of: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = token_of()
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{token}\n"))
    result = call("login", live_server.url + "/", "--token-stdin")
    assert result.code == 0, result.err
    assert "signed in as owner (operator)" in result.out
    assert token not in result.out + result.err
    kept = tmp_path / "config" / "login.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert json.loads(kept.read_text()) == {"url": live_server.url, "token": token}
    assert "owner (operator) on http://" in call("whoami").out
    assert call("logout").code == 0
    assert not kept.exists()
    again = call("ls")
    assert (again.code, again.out) == (4, "")
    assert "archipelago login URL" in again.err


def test_login_with_an_invalid_token_stores_nothing(
    call: Call, live_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("arch_nonsense\n"))
    result = call("login", live_server.url)
    assert result.code == 4
    assert "expected a valid token" in result.err
    assert not (tmp_path / "config").exists()


def test_a_token_is_not_sent_to_another_server(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "config" / "login.json"
    kept.parent.mkdir()
    kept.write_text('{"url": "http://127.0.0.1:1", "token": "arch_x"}')
    monkeypatch.setenv("ARCHIPELAGO_URL", "http://127.0.0.1:2")
    result = call("ls")
    assert result.code == 4
    assert "no token for http://127.0.0.1:2" in result.err


def test_unreachable_server(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archipelago.transport.time.sleep", lambda _: None)
    monkeypatch.setattr(
        Client.__init__, "__kwdefaults__", {"timeout_s": 1.0, "sleep": lambda _: None}
    )
    monkeypatch.setenv("ARCHIPELAGO_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("ARCHIPELAGO_TOKEN", "arch_x")
    result = call("ls")
    assert result.code == 3
    assert result.err.startswith("archipelago: http://127.0.0.1:1 does not respond: ")
