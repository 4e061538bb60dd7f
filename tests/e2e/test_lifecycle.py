"""The lifecycle of a run on the live stack, through the API: pause, resume, forced stop, resume
without replicas, checkpoint, fork, import into another database, archive and delete."""

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

from tests.e2e.lives import POLL_S, create, wait_for_ingest
from tests.servers import wait_until
from tests.stack import REPOSITORY, LiveStack, stack_env

pytestmark = [pytest.mark.processes, pytest.mark.slow(minutes=2)]

_TOKEN = """
from django.contrib.auth.models import User
from runs.actions import api_tokens as tokens
owner = User.objects.get(username="operator")
print(tokens.issue(owner, name="life", scopes=["operate"])[1])
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
    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Client:
    """The API with a token of the operator."""

    def __init__(self, stack: LiveStack) -> None:
        self.url = f"{stack.url}api"
        self.token = stack.python(_TOKEN)

    def ask(self, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {self.token}",
                "Content-Type": "application/json",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise Refused(f"{path}: {error.code} {error.read()[:500]!r}", error.code) from None

    def act(self, run: str, action: str, **body: Any) -> None:
        assert self.ask(f"/runs/{run}/{action}", body)["changed"]

    def until(self, run: str, ready: Callable[[dict[str, Any]], object], what: str) -> Any:
        """Wait until ``ready`` accepts the run, which must not fail; return the run."""
        seen: dict[str, Any] = {}

        def check() -> object:
            seen.update(self.ask(f"/runs/{run}"))
            assert seen["state"] != "failed", seen["state_reason"]
            return ready(seen)

        wait_until(check, f"{what}: last seen {seen}", every_s=POLL_S)
        return seen

    def rounds(self, run: str, least: int) -> int:
        """Wait until the run trains with ``least`` committed rounds; return their number."""
        seen = self.until(
            run,
            lambda now: now["state"] == "running" and now["committed_rounds"] >= least,
            f"{least} rounds",
        )
        return int(seen["committed_rounds"])

    def saved(self, run: str, *, but: set[int]) -> dict[str, Any]:
        """Wait for the requested checkpoint and return it."""
        result: list[dict[str, Any]] = []

        def check() -> bool:
            result[:] = self.ask(f"/runs/{run}/checkpoints")
            return any(one["round"] not in but for one in result)

        wait_until(check, f"a checkpoint beside {but}", every_s=POLL_S)
        return next(one for one in result if one["round"] not in but)

    def status(self, run: str) -> int:
        try:
            self.ask(f"/runs/{run}")
        except Refused as error:
            return error.status
        return 200

    def attempts(self, run: str) -> list[dict[str, Any]]:
        result = [
            attempt
            for replica in self.ask(f"/runs/{run}/replicas")
            for attempt in self.ask(f"/runs/{run}/replicas/{replica['number']}")["attempts"]
        ]
        return sorted(result, key=lambda attempt: str(attempt["launch_key"]))

    def gone(self, run: str) -> list[dict[str, Any]]:
        """Wait until every attempt has ended; return all attempts."""
        result: list[dict[str, Any]] = []

        def check() -> bool:
            result[:] = self.attempts(run)
            return all(attempt["ended_at"] for attempt in result)

        wait_until(check, f"the machines of {run}", every_s=POLL_S)
        assert not processes(run)
        return result


def processes(run: str) -> list[int]:
    """Processes of the run on this machine, found by the launch key."""
    short = run.replace("-", "")[:12]
    result = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            texts = [*process.cmdline(), *process.environ().values()]
            if any(short in text for text in texts):
                result.append(process.pid)
    return result


def job_logs(stack: LiveStack) -> str:
    """The ends of the logs of all jobs."""
    logs = sorted(path for path in stack.var.rglob("log") if path.is_file())
    return "\n".join(f"{path}:\n{path.read_text(errors='replace')[-3000:]}" for path in logs)


def test_a_whole_life(live_stack: LiveStack, tmp_path: Path) -> None:
    api = Client(live_stack)
    run = create(live_stack, "nine lives", total_rounds=9999, sync_every=20, checkpoint_every=5000)
    api.rounds(run, 3)
    assert len(processes(run)) >= 2

    api.act(run, "pause")
    paused = api.until(run, lambda now: now["state"] == "paused", "paused")
    codes = [attempt["exit_code"] for attempt in api.gone(run)]
    assert codes == [143, 143], job_logs(live_stack)  # a graceful exit
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
    wait_for_ingest(live_stack, run, fork)
    elsewhere = import_elsewhere(live_stack, tmp_path, over["rendezvous"])
    here, there = rows_of(live_stack.env, run), rows_of(elsewhere, run)
    leave_out_late_arrivals(here, there)
    assert differences(here, there) == []

    api.act(run, "describe", archived=True)
    assert run not in {row["id"] for row in api.ask("/runs")["runs"]}
    folder = live_stack.var / "rendezvous" / run
    assert (folder / "group.json").exists()
    api.act(run, "delete", name="nine lives", objects=True)
    wait_until(lambda: api.status(run) == 404, "deleted", every_s=POLL_S)
    assert not [path for path in folder.rglob("*") if path.is_file()]
    assert api.ask(f"/runs/{fork}")["state"] == "cancelled"  # the fork is independent


def leave_out_late_arrivals(here: dict[str, list[Any]], there: dict[str, list[Any]]) -> None:
    """A record that arrives after ingest has passed its round is known from telemetry alone; an
    import reads it."""
    arrived = {
        (row["round"], row["replica"])
        for row in here["Contribution"]
        if row["state"] == "late" and row["uploaded_at"] is None
    }
    late_rounds = {number for number, _ in arrived}
    for tables in (here, there):
        tables["Contribution"] = [
            row for row in tables["Contribution"] if (row["round"], row["replica"]) not in arrived
        ]
        for row in tables["Round"]:
            if row["number"] in late_rounds:
                del row["lateness"]


def differences(here: dict[str, list[Any]], there: dict[str, list[Any]]) -> list[str]:
    """Differing columns of rows with the same position, and differing numbers of rows."""
    result = []
    for table in here | there:
        rows, peer_rows = here[table], there[table]
        if len(rows) != len(peer_rows):
            result.append(f"{table}: {len(rows)} rows here, {len(peer_rows)} there")
        for n, (one, other) in enumerate(zip(rows, peer_rows, strict=False)):
            result += [
                f"{table} {n}: {name} is {str(one.get(name))[:200]} here, "
                f"{str(other.get(name))[:200]} there"
                for name in one | other
                if one.get(name) != other.get(name)
            ]
    return result


def rows_of(env: dict[str, str], run: str) -> dict[str, list[Any]]:
    result: dict[str, list[Any]] = json.loads(
        manage(env, "shell", "--no-imports", "-c", _ROWS.format(run=run))
    )
    return result


def import_elsewhere(stack: LiveStack, folder: Path, uri: str) -> dict[str, str]:
    """Import the run on a server with an empty database; return that server's environment."""
    env = {
        **stack_env(folder, migrated=True),
        "REDIS_URL": "redis://127.0.0.1:1/0",  # no worker runs its tasks
        "ARCHIPELAGO_RENDEZVOUS_ROOTS": str(stack.var / "rendezvous"),
    }
    manage(env, "shell", "--no-imports", "-c", _EMPTY)
    assert "remark" not in manage(env, "import_run", uri)
    return env


def manage(env: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "manage.py", *command],
        cwd=REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout if command[0] == "shell" else done.stdout + done.stderr
