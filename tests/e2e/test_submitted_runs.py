"""Runs on the live stack from their submission to their end: uploaded code trains, and bad input is
reported on the run, in its events and in the replica's log."""

from __future__ import annotations

import base64
import io
import zipfile
from pathlib import Path

import pytest

from tests.e2e.lives import create, look, wait_for, wait_for_failure, wait_for_ingest
from tests.stack import REPOSITORY, LiveStack

pytestmark = [pytest.mark.processes, pytest.mark.slow(minutes=1)]

EXAMPLE = REPOSITORY / "examples" / "custom_workload" / "spirals.py"

_CREATE = """
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
        num_replicas=2, sync_every=5, total_rounds=3, warmup_steps=0, batch_size=8,
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


def zipped(*files: Path) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for file in files:
            archive.writestr(file.name, file.read_text())
    return buffer.getvalue()


def test_uploaded_code_trains_to_the_end(live_stack: LiveStack) -> None:
    data = base64.b64encode(zipped(EXAMPLE)).decode()
    run = live_stack.python(_CREATE.format(data=data, arguments={}))
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
