"""Authorization of live streams, its periodic renewal, and their database connections."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.db import OperationalError
from django.test import AsyncClient, Client

from dashboard.live import feed
from runs.models import Run
from tests.browser import seed
from tests.dashboard.page_harness import KINDS, client_for
from tests.dashboard.streaming import watch


@pytest.mark.django_db
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["list", "run"])
def test_stream_permissions(which: str, kind: str) -> None:
    run = seed.run(seed.user("owner", "operator"), committed=0)
    url = f"/runs/{run.pk}/stream" if which == "run" else "/stream"
    response = client_for(kind, run.owner).get(url)
    assert response.status_code == (401 if kind == "anonymous" else 200)
    if kind != "anonymous":
        assert response["Content-Type"] == "text/event-stream"
        assert response["Cache-Control"] == "no-store"


@pytest.mark.django_db
def test_stream_of_an_unknown_run(client: Client) -> None:
    client.force_login(seed.user("olga", "operator"))
    assert client.get(f"/runs/{uuid.uuid4()}/stream").status_code == 404


@pytest.mark.django_db(transaction=True)
def test_no_database_connection_is_held_while_streaming(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dashboard.live import views

    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    closed: list[bool] = []
    monkeypatch.setattr(views.connections, "close_all", lambda: closed.append(True))
    client = AsyncClient()
    client.force_login(seed.user("olga", "operator"))

    async def work() -> None:
        response = await client.get("/stream")
        assert closed == [True]
        frames = aiter(response.streaming_content)
        assert b"retry" in await anext(frames)
        await frames.aclose()

    watch(work)


def _sign_out(user: Any) -> None:
    Session.objects.all().delete()


def _deactivate(user: Any) -> None:
    User.objects.update(is_active=False)


def _take_role(user: Any) -> None:
    user.groups.clear()


def _change_password(user: Any) -> None:
    user.set_password("another one, longer")
    user.save()


def _delete_run(user: Any) -> None:
    Run.objects.all().delete()


def _nothing(user: Any) -> None:
    pass


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "loses", [_sign_out, _deactivate, _take_role, _change_password, _delete_run, _nothing]
)
def test_an_open_stream_ends_when_its_viewer_loses_access(
    loses: Callable[[Any], None], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dashboard.live import views

    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    monkeypatch.setattr(feed, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(feed, "RECHECK_S", 0.0)
    closed: list[bool] = []
    close_all = views.connections.close_all
    monkeypatch.setattr(views.connections, "close_all", lambda: (closed.append(True), close_all()))
    user = seed.user("olga", "operator")
    run = seed.run(user, committed=0)
    client = AsyncClient()
    client.force_login(user)

    async def beats(frames: AsyncIterator[bytes], most: int) -> int:
        result = 0
        async for frame in frames:
            result += b"event: beat" in frame
            if result == most:
                break
        return result

    async def work() -> None:
        response = await client.get(f"/runs/{run.pk}/stream")
        frames = aiter(response.streaming_content)
        assert await beats(frames, 3) == 3
        checks = len(closed)
        assert checks >= 3  # each check closes its connection
        await sync_to_async(loses)(user)
        left = await beats(frames, 50)
        assert left == 50 if loses is _nothing else left < 50
        assert len(closed) > checks
        await frames.aclose()

    watch(work)


@pytest.mark.django_db(transaction=True)
def test_streams_continue_while_the_database_is_down(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dashboard.live import views

    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    monkeypatch.setattr(feed, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(feed, "RECHECK_S", 0.0)
    client = AsyncClient()
    client.force_login(seed.user("olga", "operator"))

    def away(request: Any) -> Any:
        raise OperationalError("no such server")

    async def work() -> None:
        response = await client.get("/stream")
        monkeypatch.setattr(views, "get_user", away)
        frames = aiter(response.streaming_content)
        result = 0
        async for frame in frames:
            result += b"event: beat" in frame
            if result == 5:
                break
        assert result == 5
        await frames.aclose()

    watch(work)
