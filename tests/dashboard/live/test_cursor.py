"""Pages that follow the live stream begin at the position before their first query."""

from __future__ import annotations

from typing import Any

import pytest
from django.db.backends.utils import CursorWrapper
from django.test import Client

from runs import live_stream
from runs.actions import boards as actions
from tests.browser import seed, seed_sweeps

PAGES = ("/", "/?group=owner", "/fleet", "/spend", "/compare?ids={run}", "/boards/{board}")


@pytest.fixture
def names(db: None, client: Client) -> dict[str, Any]:
    user = seed.user("olga", "operator")
    client.force_login(user)
    board = actions.save(user, name="Live", query="is:active", shared=True)
    sweep = seed_sweeps.sweep(user, [1.0])
    return {"run": seed.run(user, name="r", replicas=1).pk, "board": board.pk, "sweep": sweep.pk}


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reads of rows and of the position, in order."""
    events: list[str] = []
    execute = CursorWrapper.execute

    def executed(self: Any, sql: str, params: Any = None) -> Any:
        if "runs_" in sql:
            events.append("query")
        return execute(self, sql, params)

    def position() -> str:
        events.append("position")
        return "17-3"

    monkeypatch.setattr(CursorWrapper, "execute", executed)
    monkeypatch.setattr(live_stream, "latest_id", position)
    return events


def test_the_snapshot_of_a_run_continues_at_the_position_before_its_data(
    client: Client, names: dict[str, Any], events: list[str]
) -> None:
    snapshot = client.get(f"/runs/{names['run']}/snapshot.json").json()
    assert snapshot["cursor"] == "17-3"
    assert events.count("position") == 1 and events.index("position") < events.index("query")


@pytest.mark.parametrize("path", [*PAGES, "/sweeps/{sweep}", "/runs/{run}/replicas/0/"])
def test_the_position_is_read_before_the_data(
    client: Client, names: dict[str, Any], events: list[str], path: str
) -> None:
    address = path.format(**names)
    html = client.get(address).content.decode()
    assert 'data-cursor="17-3"' in html and "data-stream" in html
    assert "query" not in events[: events.index("position")]
    part = client.get(f"{address}{'&' if '?' in address else '?'}part=1")
    assert "data-cursor" not in part.content.decode()
