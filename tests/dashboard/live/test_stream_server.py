"""Live streams served by uvicorn: cost of a viewer, and authentication."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from dashboard.server import commands
from tests.django_process import DjangoProcess
from tests.servers import child, free_ports, wait_until
from tests.stack import REPOSITORY, stack_env

pytestmark = pytest.mark.processes

VIEWERS = 40

_PREPARE = """
from django.contrib.auth import get_user_model
from django.contrib.sessions.backends.db import SessionStore
from django.contrib.auth import SESSION_KEY, BACKEND_SESSION_KEY, HASH_SESSION_KEY
from tests.browser import seed
run = seed.run(seed.user("olga", "operator"), committed=0)
def sign_in(user):
    session = SessionStore()
    session[SESSION_KEY] = str(user.pk)
    session[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
    session[HASH_SESSION_KEY] = user.get_session_auth_hash()
    session.create()
    return session.session_key
no_role = get_user_model().objects.create_user("no_role")
print(run.pk, sign_in(seed.user("vera", "viewer")), sign_in(no_role))
"""


@dataclass(frozen=True, kw_only=True)
class Web:
    port: int
    pid: int
    env: dict[str, str]
    process: DjangoProcess
    run: str
    viewer: str
    no_role: str

    def get(self, path: str, session: str = "", **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        cookie = {"Cookie": f"sessionid={session}"} if session else {}
        connection.request("GET", path, headers={**cookie, **headers})
        return connection.getresponse()

    def publish(self, text: str) -> None:
        self.process.run(
            f"from runs.live_stream import publish as p; assert p('{self.run}', {{'x': '{text}'}})"
        )

    @property
    def threads(self) -> int:
        return psutil.Process(self.pid).num_threads()


@pytest.fixture(scope="module")
def web(valkey: str, tmp_path_factory: pytest.TempPathFactory, own_database: None) -> Iterator[Web]:
    var = tmp_path_factory.mktemp("web")
    (port,) = free_ports(1)
    many = {f"ARCHIPELAGO_STREAMS_PER_{whose}": "1000" for whose in ("SESSION", "USER")}
    env = {**stack_env(var, migrated=True), **many, "REDIS_URL": valkey}
    applications = {"dashboard.asgi:application": "tests.web_application:application"}
    words = commands.web(host="127.0.0.1", port=port)[1:]
    command = [sys.executable, *(applications.get(word, word) for word in words)]
    log = var / "log"
    with (
        contextlib.closing(DjangoProcess(env)) as beside,
        child(command, log=log, env=env, cwd=REPOSITORY) as process,
    ):
        run, viewer, no_role = beside.run(_PREPARE).split()
        web = Web(
            port=port,
            pid=process.pid,
            env=env,
            process=beside,
            run=run,
            viewer=viewer,
            no_role=no_role,
        )

        def answers() -> bool:
            with contextlib.suppress(OSError):
                return web.get("/login").status == 200
            return False

        wait_until(answers, "the web server did not start", process=process, log=log)
        yield web


def read_until(response: http.client.HTTPResponse, wanted: bytes) -> bytes:
    result = b""
    while wanted not in result:
        line = response.readline()
        assert line, f"the stream ended before {wanted!r}: {result!r}"
        result += line
        assert result.count(b"event: beat") < 3, f"{wanted!r} does not come: {result!r}"
    return result


def connections_of(web: Web) -> list[Any]:
    """Connections of the web process, according to PostgreSQL."""
    import psycopg

    ports = {c.laddr.port for c in psutil.Process(web.pid).net_connections() if c.raddr}
    with psycopg.connect(web.env["DATABASE_URL"]) as database:
        rows = database.execute(
            "SELECT client_port, state, query FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ).fetchall()
    return [row for row in rows if row[0] in ports]


def open_database_files(web: Web) -> list[str]:
    paths = [file.path for file in psutil.Process(web.pid).open_files()]
    return [path for path in paths if re.search(r"archipelago\.sqlite3", path)]


def test_a_viewer_holds_no_thread_and_no_database_connection(web: Web) -> None:
    """Pages served before can leave connections; the test counts only what the streams add."""
    web.get("/", web.viewer).read()
    threads = web.threads
    with contextlib.ExitStack() as closing:
        answers = [web.get(f"/runs/{web.run}/stream", web.viewer) for _ in range(VIEWERS)]
        for response in answers:
            closing.callback(response.close)
            read_until(response, b'"ok":true')
        assert web.threads < threads + 12, f"{threads} -> {web.threads} with {VIEWERS} viewers"
        # That of the page before is closed soon; one of a stream would stay.
        held = connections_of if "DATABASE_URL" in web.env else open_database_files
        wait_until(lambda: held(web) == [], "a viewer holds a database connection")
        web.publish("sent")
        for response in answers:
            assert b'"delta":{"x":"sent"}' in read_until(response, b"sent")


def test_one_stream_carries_and_resumes_several_topics(web: Web) -> None:
    path = f"/stream?topic=list:&topic={web.run}:&topic={uuid.uuid4()}:"
    response = web.get(path, web.viewer)
    read_until(response, b'"ok":true')
    web.publish("first")
    result = read_until(response, b"first").decode()
    response.close()
    web.publish("second")
    (last,) = re.findall(r"^id: (\S+)", result, re.MULTILINE)
    again = web.get(path, web.viewer, **{"Last-Event-ID": last})
    result = read_until(again, b"second").decode()
    again.close()
    assert "first" not in result
    data = result[result.index('data: {"topic"') :].splitlines()[0].removeprefix("data: ")
    assert json.loads(data) == {"topic": web.run, "delta": {"x": "second"}}


@pytest.mark.parametrize("path", ["/stream", "/runs/{run}/stream"])
def test_stream_authentication(web: Web, path: str) -> None:
    path = path.format(run=web.run)
    assert web.get(path).status == 401
    assert web.get(path, "made-up").status == 401
    assert web.get(path, web.no_role).status == 403
    response = web.get(path, web.viewer)
    assert response.status == 200
    assert response.headers["Content-Type"] == "text/event-stream"
    assert response.headers["Cache-Control"] == "no-store"
    for name in ("Content-Security-Policy", "X-Frame-Options", "X-Content-Type-Options"):
        assert response.headers[name], name
    response.close()


UNKNOWN = uuid.UUID(int=4 << 76 | 2 << 62 | 1)
"""A valid id that no run has."""


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/stream?topic=nonsense", 400),
        ("/stream?" + "&".join(f"topic={uuid.UUID(int=n)}" for n in range(65)), 400),
        (f"/stream?topic={UNKNOWN}", 404),
        (f"/runs/{UNKNOWN}/stream", 404),
        ("/elsewhere/stream", 404),  # from Django's own handler
    ],
)
def test_invalid_topics(web: Web, path: str, status: int) -> None:
    assert web.get(path, web.viewer).status == status


def test_an_unknown_host_is_rejected(web: Web) -> None:
    assert web.get("/stream", web.viewer, Host="evil.example").status == 400


def test_post_is_rejected(web: Web) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", web.port, timeout=600)
    connection.request("POST", "/stream", headers={"Cookie": f"sessionid={web.viewer}"})
    assert connection.getresponse().status == 405
