"""Live streams as uvicorn serves them: what a viewer costs, and who is let in."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from dashboard.server import commands
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
nobody = get_user_model().objects.create_user("nobody")
print(run.pk, sign_in(seed.user("vera", "viewer")), sign_in(nobody))
"""


@dataclass(frozen=True, kw_only=True)
class Web:
    port: int
    pid: int
    env: dict[str, str]
    run: str
    viewer: str
    nobody: str

    def get(self, path: str, session: str = "", **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        cookie = {"Cookie": f"sessionid={session}"} if session else {}
        connection.request("GET", path, headers={**cookie, **headers})
        return connection.getresponse()

    def publish(self, text: str) -> None:
        code = (
            f"from runs.live_stream import publish as p; assert p('{self.run}', {{'x': '{text}'}})"
        )
        run_python(code, self.env)

    @property
    def threads(self) -> int:
        return psutil.Process(self.pid).num_threads()


def run_python(code: str, env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "manage.py", "shell", "--no-imports", "-c", code],
        cwd=REPOSITORY, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def web(valkey: str, tmp_path_factory: pytest.TempPathFactory, own_database: None) -> Iterator[Web]:
    var = tmp_path_factory.mktemp("web")
    (port,) = free_ports(1)
    many = {f"ARCHIPELAGO_STREAMS_PER_{whose}": "1000" for whose in ("SESSION", "USER")}
    env = {**stack_env(var), **many, "REDIS_URL": valkey}
    subprocess.run(
        [sys.executable, "manage.py", "migrate", "--verbosity", "0"],
        cwd=REPOSITORY, env=env, check=True,
    )  # fmt: skip
    run, viewer, nobody = run_python(_PREPARE, env).split()
    command = [sys.executable, *commands.web(host="127.0.0.1", port=port)[1:]]
    log = var / "log"
    with child(command, log=log, env=env, cwd=REPOSITORY) as process:
        web = Web(port=port, pid=process.pid, env=env, run=run, viewer=viewer, nobody=nobody)

        def answers() -> bool:
            with contextlib.suppress(OSError):
                return web.get("/login").status == 200
            return False

        wait_until(answers, "the web server did not start", process=process, log=log)
        yield web


def read_until(answer: http.client.HTTPResponse, wanted: bytes) -> bytes:
    found = b""
    while wanted not in found:
        line = answer.readline()
        assert line, f"the stream ended before {wanted!r}: {found!r}"
        found += line
        assert found.count(b"event: beat") < 3, f"{wanted!r} does not come: {found!r}"
    return found


def connections_of(web: Web) -> list[Any]:
    """What PostgreSQL says of the connections that the web process holds."""
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


def test_a_viewer_costs_no_thread_and_holds_no_database_connection(web: Web) -> None:
    """Pages that were answered before may have left some: what counts is that streams add none."""
    web.get("/", web.viewer).read()
    threads = web.threads
    with contextlib.ExitStack() as closing:
        answers = [web.get(f"/runs/{web.run}/stream", web.viewer) for _ in range(VIEWERS)]
        for answer in answers:
            closing.callback(answer.close)
            read_until(answer, b'"ok":true')
        assert web.threads < threads + 12, f"{threads} -> {web.threads} with {VIEWERS} viewers"
        if "DATABASE_URL" in web.env:
            assert connections_of(web) == []
        else:
            assert open_database_files(web) == []
        web.publish("told")
        for answer in answers:
            assert b'"delta":{"x":"told"}' in read_until(answer, b"told")


def test_several_topics_come_over_one_stream_and_resume(web: Web) -> None:
    path = f"/stream?topic=list:&topic={web.run}:&topic={uuid.uuid4()}:"
    answer = web.get(path, web.viewer)
    read_until(answer, b'"ok":true')
    web.publish("first")
    found = read_until(answer, b"first").decode()
    answer.close()
    web.publish("second")
    (last,) = re.findall(r"^id: (\S+)", found, re.MULTILINE)
    again = web.get(path, web.viewer, **{"Last-Event-ID": last})
    found = read_until(again, b"second").decode()
    again.close()
    assert "first" not in found
    data = found[found.index('data: {"topic"') :].splitlines()[0].removeprefix("data: ")
    assert json.loads(data) == {"topic": web.run, "delta": {"x": "second"}}


@pytest.mark.parametrize("path", ["/stream", "/runs/{run}/stream"])
def test_who_is_let_in(web: Web, path: str) -> None:
    path = path.format(run=web.run)
    assert web.get(path).status == 401
    assert web.get(path, "made-up").status == 401
    assert web.get(path, web.nobody).status == 403
    answer = web.get(path, web.viewer)
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/event-stream"
    assert answer.headers["Cache-Control"] == "no-store"
    for name in ("Content-Security-Policy", "X-Frame-Options", "X-Content-Type-Options"):
        assert answer.headers[name], name
    answer.close()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/stream?topic=nonsense", 400),
        ("/stream?" + "&".join(f"topic={uuid.uuid4()}" for _ in range(65)), 400),
        (f"/stream?topic={uuid.uuid4()}", 404),
        (f"/runs/{uuid.uuid4()}/stream", 404),
        ("/elsewhere/stream", 404),  # of Django's own handler
    ],
)
def test_what_cannot_be_followed(web: Web, path: str, status: int) -> None:
    assert web.get(path, web.viewer).status == status


def test_another_host_is_refused(web: Web) -> None:
    assert web.get("/stream", web.viewer, Host="evil.example").status == 400


def test_a_post_is_refused(web: Web) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", web.port, timeout=20)
    connection.request("POST", "/stream", headers={"Cookie": f"sessionid={web.viewer}"})
    assert connection.getresponse().status == 405
