"""Runs on the live stack from their submission to their end.

One is paused, resumed, stopped by force, resumed without replicas, saved, forked, imported into
another database, archived and deleted, through the API. Uploaded code trains, and bad input is
reported on the run, in its events and in the replica's log. All are in one file, so that they share
a server."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.django_process import DjangoProcess
from tests.e2e.lives import (
    POLL_S,
    create,
    look,
    wait_for,
    wait_for_failure,
    wait_for_ingest,
)
from tests.servers import wait_until
from tests.stack import REPOSITORY, LiveStack, stack_env

pytestmark = [pytest.mark.processes, pytest.mark.slow(minutes=3)]

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
_IMPORT = """
import sys
from django.contrib.auth.models import User
from django.core.management import call_command
from runs.models import Run
assert not Run.objects.exists()
User.objects.create_user("operator")
call_command("import_run", {uri!r}, stdout=sys.stdout, stderr=sys.stdout)
"""
EXAMPLE = REPOSITORY / "examples" / "custom_workload" / "spirals.py"

_UPLOAD = """
import base64, secrets
from django.contrib.auth.models import User
from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import CustomWorkload
from runs.submit.uploads import store_archive
from runs.submit.run_draft import PoolDraft, RunDraft
from runs.submit.create import create_run
data = base64.b64decode({data!r})
import hashlib
draft = RunDraft(
    name="own code",
    settings=GroupSettings(
        num_replicas=2, min_quorum=2, sync_every=5, total_rounds=3, warmup_steps=0, batch_size=8,
        heartbeat_timeout_s=6.0, start_wait_s=300.0,
    ),
    workload=CustomWorkload(
        function="spirals:build", archive=hashlib.sha256(data).hexdigest(), arguments={arguments!r}
    ),
    pools=(PoolDraft(count=2),),
    archive=data,
)
owner = User.objects.get(username="operator")
print(create_run(draft, owner=owner, submit_key=secrets.token_hex()).pk)
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
        """Wait for a checkpoint of another round and return it."""
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
        wait_until(lambda: not processes(run), f"the processes of {run}", every_s=POLL_S)
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


@pytest.fixture
def api(live_stack: LiveStack) -> Iterator[Client]:
    """The API. A failed test leaves no run behind that takes the processor from other tests."""
    client = Client(live_stack)
    yield client
    for run in client.ask("/runs?q=is:active")["runs"]:
        client.act(run["id"], "stop", force=True)


def test_a_whole_life(live_stack: LiveStack, api: Client, tmp_path: Path) -> None:
    run = create(live_stack, "nine lives", total_rounds=9999, checkpoint_every=5000)
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
    first = api.saved(fork, but=set())
    assert (first["round"], first["digest"]) == (0, saved["digest"])

    for one in (fork, run):
        api.act(one, "stop")
    for one in (fork, run):
        over = api.until(one, lambda now: now["state"] == "cancelled", "stopped")
        assert "at round" in over["state_reason"]
        api.gone(one)
    wait_for_ingest(live_stack, run, fork)
    with server_elsewhere(live_stack, tmp_path) as elsewhere:
        assert "remark" not in elsewhere.run(_IMPORT.format(uri=over["rendezvous"]))
        here, there = (
            json.loads(each.run(_ROWS.format(run=run))) for each in (live_stack.process, elsewhere)
        )
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


@contextlib.contextmanager
def server_elsewhere(stack: LiveStack, folder: Path) -> Iterator[DjangoProcess]:
    """A Django process with an empty database that reads the same buckets."""
    env = {
        **stack_env(folder, migrated=True),
        "REDIS_URL": "redis://127.0.0.1:1/0",  # no worker runs its tasks
        "ARCHIPELAGO_RENDEZVOUS_ROOTS": str(stack.var / "rendezvous"),
    }
    with contextlib.closing(DjangoProcess(env)) as process:
        yield process


def zipped(*files: Path) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for file in files:
            archive.writestr(file.name, file.read_text())
    return buffer.getvalue()


def test_uploaded_code_trains_to_the_end(live_stack: LiveStack) -> None:
    data = base64.b64encode(zipped(EXAMPLE)).decode()
    run = live_stack.python(_UPLOAD.format(data=data, arguments={}))
    wait_for(
        live_stack,
        run,
        # The run ends with its result; its jobs can end later.
        lambda seen: (
            seen["state"] == "succeeded"
            and all(attempt["exit_code"] is not None for attempt in seen["attempts"])
        ),
    )
    wait_for_ingest(live_stack, run)
    seen = look(live_stack, run)
    assert seen["rounds"] == 3
    assert [count for *_, count in seen["contributions"]] == [2, 2, 2]
    assert [a["exit_code"] for a in seen["attempts"]] == [0, 0]


def test_a_replica_that_cannot_start_fails_the_run_with_its_error(live_stack: LiveStack) -> None:
    """The data existed at submission and is missing when the replicas start."""
    run = create(live_stack, "no data", data="file:///nowhere/at/all")
    seen = wait_for_failure(live_stack, run)
    assert "expected" in seen["reason"] and "file:///nowhere/at/all" in seen["reason"]
    assert seen["restarts"] == [0, 0], "a restart cannot fix it"
    assert {a["exit_code"] for a in seen["attempts"]} == {78}
    errors = [event for event in seen["events"] if event["level"] == "error"]
    assert any("file:///nowhere/at/all" in event["message"] for event in errors)
    assert {event["replica__number"] for event in errors} >= {0, 1}
    (log, *_) = (live_stack.var / "jobs").glob(f"{run.replace('-', '')[:12]}-0-1/log")
    assert "file:///nowhere/at/all" in log.read_text()


def test_a_rendezvous_of_another_run_is_refused(live_stack: LiveStack) -> None:
    taken = live_stack.var / "rendezvous" / "taken"
    taken.mkdir(parents=True)
    (taken / "group.json").write_text("{}")
    run = create(live_stack, "taken", rendezvous=str(taken))
    seen = wait_for_failure(live_stack, run)
    assert "expected no group.json or this run's, found one that is not" in seen["reason"]
    assert seen["attempts"] == []
    assert (taken / "group.json").read_text() == "{}"
