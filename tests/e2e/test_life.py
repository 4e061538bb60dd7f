"""A run's whole life on the real server, as a client of the API leads it: paused and sent on, ended
by force, resumed when everybody was gone, saved, forked, read back out of its bucket into another
database, archived and deleted."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.lives import create
from tests.servers import wait_until
from tests.stack import REPOSITORY, LiveStack, stack_env

pytestmark = pytest.mark.processes

_TOKEN = """
from django.contrib.auth.models import User
from runs.actions import api_tokens as tokens
owner = User.objects.get(username="operator")
print(tokens.issue(owner, name="life", scopes=["operate"])[1])
"""
_SETTLED = """
from runs.queries import selectors
print(not selectors.runs_to_look_after().filter(pk__in={runs!r}).exists())
"""
_ROWS = """
import json
from runs.models import Run
from tests.runs.rows import rows
print(json.dumps(rows(Run.objects.get(pk={run!r})), sort_keys=True, default=str))
"""
_EMPTY = """
from django.contrib.auth.models import User
from runs.models import Run
assert not Run.objects.exists()
User.objects.create_user("operator")
"""


class Refused(AssertionError):
    def __init__(self, said: str, status: int) -> None:
        super().__init__(said)
        self.status = status


class Client:
    """The API with a token of the operator's."""

    def __init__(self, stack: LiveStack) -> None:
        self.url = f"{stack.url}api"
        self.token = stack.python(_TOKEN)

    def ask(self, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {self.token}", "Content-Type": "application/json",
            },
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise Refused(f"{path}: {error.code} {error.read()[:500]!r}", error.code) from None

    def act(self, run: str, what: str, **body: Any) -> None:
        assert self.ask(f"/runs/{run}/{what}", body)["changed"]

    def until(self, run: str, ready: Callable[[dict[str, Any]], object], what: str) -> Any:
        """The run, as soon as it is so. It must not fail on the way."""
        seen: dict[str, Any] = {}

        def check() -> object:
            seen.update(self.ask(f"/runs/{run}"))
            assert seen["state"] != "failed", seen["state_reason"]
            return ready(seen)

        wait_until(check, f"{what}: last seen {seen}", timeout_s=120, every_s=0.2)
        return seen

    def rounds(self, run: str, least: int) -> int:
        """Until it trains and so many rounds are committed; how many are."""
        seen = self.until(
            run,
            lambda now: now["state"] == "running" and now["committed_rounds"] >= least,
            f"{least} rounds",
        )
        return int(seen["committed_rounds"])

    def saved(self, run: str, *, but: set[int]) -> dict[str, Any]:
        """The checkpoint that somebody asked for, as soon as it is there."""
        found: list[dict[str, Any]] = []

        def check() -> bool:
            found[:] = self.ask(f"/runs/{run}/checkpoints")
            return any(one["round"] not in but for one in found)

        wait_until(check, f"a checkpoint beside {but}", timeout_s=60, every_s=0.2)
        return next(one for one in found if one["round"] not in but)

    def status(self, run: str) -> int:
        try:
            self.ask(f"/runs/{run}")
        except Refused as error:
            return error.status
        return 200

    def attempts(self, run: str) -> list[dict[str, Any]]:
        found = [
            attempt
            for replica in self.ask(f"/runs/{run}/replicas")
            for attempt in self.ask(f"/runs/{run}/replicas/{replica['number']}")["attempts"]
        ]
        return sorted(found, key=lambda attempt: str(attempt["launch_key"]))

    def gone(self, run: str) -> list[dict[str, Any]]:
        """Until each of its machines has been released; all there were."""
        found: list[dict[str, Any]] = []

        def check() -> bool:
            found[:] = self.attempts(run)
            return all(attempt["ended_at"] for attempt in found)

        wait_until(check, f"the machines of {run}", timeout_s=60, every_s=0.2)
        assert not processes(run)
        return found


def processes(run: str) -> list[int]:
    """Whatever works for the run on this machine: launch keys begin with its id."""
    short = run.replace("-", "")[:12]
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            said = [*process.cmdline(), *process.environ().values()]
            if any(short in text for text in said):
                found.append(process.pid)
    return found


def test_a_whole_life(live_stack: LiveStack, tmp_path: Path) -> None:
    api = Client(live_stack)
    run = create(live_stack, "nine lives", total_rounds=9999, sync_every=20, checkpoint_every=5000)
    api.rounds(run, 3)
    assert len(processes(run)) >= 2

    api.act(run, "pause")
    paused = api.until(run, lambda now: now["state"] == "paused", "paused")
    assert [a["exit_code"] for a in api.gone(run)] == [143, 143]  # they left by themselves
    api.act(run, "resume")
    before = api.rounds(run, paused["committed_rounds"] + 2)
    assert [r["restarts"] for r in api.ask(f"/runs/{run}/replicas")] == [0, 0]

    api.act(run, "stop", force=True)
    stopped = api.until(run, lambda now: now["state"] == "cancelled", "stopped")
    assert len(api.gone(run)) == 4
    assert stopped["committed_rounds"] >= before
    api.act(run, "resume")
    api.rounds(run, stopped["committed_rounds"] + 2)

    known = {checkpoint["round"] for checkpoint in api.ask(f"/runs/{run}/checkpoints")}
    api.act(run, "save")
    saved = api.saved(run, but=known)
    document = api.ask(f"/runs/{run}/document?fork=true&round={saved['round']}")
    fork = str(api.ask("/runs", document)["id"])
    api.rounds(fork, 2)
    [first] = api.ask(f"/runs/{fork}/checkpoints")
    assert (first["round"], first["digest"]) == (0, saved["digest"])

    for one in (fork, run):
        api.act(one, "stop")
    for one in (fork, run):
        over = api.until(one, lambda now: now["state"] == "cancelled", "stopped")
        assert "at round" in over["state_reason"]
        api.gone(one)
    question = _SETTLED.format(runs=[run, fork])
    wait_until(
        lambda: live_stack.python(question) == "True", "all is told", timeout_s=60, every_s=0.2
    )
    elsewhere = import_elsewhere(live_stack, tmp_path, over["rendezvous"])
    here, there = rows_of(live_stack.env, run), rows_of(elsewhere, run)
    assert differences(here, there) == []

    api.act(run, "describe", archived=True)
    assert run not in {row["id"] for row in api.ask("/runs")["runs"]}
    folder = live_stack.var / "rendezvous" / run
    assert (folder / "group.json").exists()
    api.act(run, "delete", name="nine lives", objects=True)
    wait_until(lambda: api.status(run) == 404, "deleted", timeout_s=60, every_s=0.2)
    assert not [path for path in folder.rglob("*") if path.is_file()]
    assert api.ask(f"/runs/{fork}")["state"] == "cancelled"  # the fork stands by itself


def differences(here: dict[str, list[Any]], there: dict[str, list[Any]]) -> list[str]:
    """What is not the same in both: columns of rows that stand in one place, or rows too many."""
    found = []
    for table in here | there:
        mine, theirs = here[table], there[table]
        if len(mine) != len(theirs):
            found.append(f"{table}: {len(mine)} rows here, {len(theirs)} there")
        for n, (one, other) in enumerate(zip(mine, theirs, strict=False)):
            found += [
                f"{table} {n}: {name} is {str(one.get(name))[:200]} here, "
                f"{str(other.get(name))[:200]} there"
                for name in one | other
                if one.get(name) != other.get(name)
            ]
    return found


def rows_of(env: dict[str, str], run: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = json.loads(
        manage(env, "shell", "--no-imports", "-c", _ROWS.format(run=run))
    )
    return found


def import_elsewhere(stack: LiveStack, folder: Path, uri: str) -> dict[str, str]:
    """The run read back by a server that has never heard of it; that server's environment."""
    env = {
        **stack_env(folder), "REDIS_URL": "redis://127.0.0.1:1/0",  # no worker takes its tasks
        "ARCHIPELAGO_RENDEZVOUS_ROOTS": str(stack.var / "rendezvous"),
    }  # fmt: skip
    manage(env, "migrate")
    manage(env, "shell", "--no-imports", "-c", _EMPTY)
    assert "remark" not in manage(env, "import_run", uri)
    return env


def manage(env: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "manage.py", *command], cwd=REPOSITORY, env=env,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout if command[0] == "shell" else done.stdout + done.stderr
