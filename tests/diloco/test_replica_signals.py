"""SIGTERM to a replica, in real processes."""

from __future__ import annotations

import os
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from diloco.exit_codes import EX_TERMINATED
from diloco.init import create_group
from diloco.protocol import keys
from diloco.protocol.records import Heartbeat, Plan
from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import ByteGPTWorkload
from diloco.replica import leave_within_s
from diloco.store.base import LocalStore, MissingKey
from diloco.training.final_result import read_final
from diloco.training.replica_state import load_replica_state
from tests import torch_process


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [({}, 10.0), ({"DILOCO_LEAVE_WITHIN_S": "120"}, 120.0), ({"DILOCO_LEAVE_WITHIN_S": "0"}, 0.0)]
    + [({"DILOCO_LEAVE_WITHIN_S": word}, 10.0) for word in ("", "soon", "-1", "nan", "inf")],
)
def test_the_shutdown_time_comes_from_the_environment(
    environment: dict[str, str], seconds: float
) -> None:
    assert leave_within_s(environment) == seconds


PROMPT = """
import sys
from diloco.membership import graceful_shutdown
graceful_shutdown.STEP_SHARE = 0.01
from diloco import replica
replica.end_process(replica.main(sys.argv[1:]))
"""
"""``python -m diloco.replica`` that makes steps for a hundredth of the time to leave. The rest, for
its contribution and its state, is a minute: enough on a busy machine."""


def start(uri: Path, text: Path) -> BaseProcess:
    environment = os.environ | {
        "REPLICA_RANK": "0",
        "OMP_NUM_THREADS": "1",
        "DILOCO_LEAVE_WITHIN_S": "60",
    }
    log = text.parent / "log.txt"
    return torch_process.start(["-c", PROMPT, str(uri)], env=environment, output=log)


def newest_beat(store: LocalStore) -> Heartbeat | None:
    listed = [info.key for info in store.list(keys.member(0)) if keys.parse_beat(info.key)]
    try:
        return Heartbeat.from_bytes(store.get(max(listed))) if listed else None
    except MissingKey:
        return None


def terminated_in_training(uri: Path, text: Path) -> tuple[int, Heartbeat]:
    """Return exit code and last heartbeat of a process that gets SIGTERM in a round."""
    store, process = LocalStore(uri), start(uri, text)
    try:
        give_up = time.monotonic() + 600
        while (beat := newest_beat(store)) is None or beat.pid != process.pid or beat.step == 0:
            assert process.is_alive() and time.monotonic() < give_up
            time.sleep(0.05)
        process.terminate()
    finally:
        (code,) = torch_process.wait([process], 600)
    last = newest_beat(store)
    assert last is not None
    return code, last


def test_sigterm_contributes_early_and_the_next_process_continues(tmp_path: Path) -> None:
    """A single replica closes the round itself, before all its steps are made."""
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 2000)
    uri, store = tmp_path / "run", LocalStore(tmp_path / "run")
    settings = GroupSettings(
        num_replicas=1,
        max_replicas=1,
        sync_every=100_000,
        total_rounds=2,
        batch_size=1,
        warmup_steps=0,
        max_tokens=0,
    )
    workload = ByteGPTWorkload(size="demo", data=str(text), eval_bytes=512).to_dict()
    create_group(str(uri), settings, workload=workload)

    code, beat = terminated_in_training(uri, text)
    assert (code, beat.state, beat.message) == (EX_TERMINATED, "left", "SIGTERM")
    saved = load_replica_state(store, 0)
    assert saved is not None and (saved.round, saved.tokens) == (1, beat.tokens)
    first = Plan.from_bytes(store.get(keys.plan(1))).contributions[0]
    assert 0 < first.steps < 100_000 and first.new_tokens == beat.tokens

    code, beat = terminated_in_training(uri, text)
    assert (code, beat.state) == (0, "done"), "its round was the run's last"
    second = Plan.from_bytes(store.get(keys.plan(2))).contributions[0]
    assert second.incarnation > first.incarnation
    assert beat.tokens == first.new_tokens + second.new_tokens
    assert read_final(store) is not None
