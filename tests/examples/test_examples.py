"""The examples run unchanged and train as documented."""

from __future__ import annotations

import json
import os
import re
import zipfile
from pathlib import Path

import pytest

from tests import torch_process

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

pytestmark = [pytest.mark.processes, pytest.mark.slow(minutes=2)]


def test_own_loop_ends_with_the_same_weights_on_both_replicas() -> None:
    done = torch_process.run(["examples/own_loop.py"], cwd=ROOT, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    weights = re.findall(r"replica \d: completed, weights \[([^]]*)\]", done.stdout)
    assert len(weights) == 2 and weights[0] == weights[1]
    result = [float(value) for value in weights[0].split(", ")]
    assert all(abs(a - b) < 0.2 for a, b in zip(result, [2.0, -1.0, 0.5, 3.0], strict=True))


def test_a_replica_of_two_ranks_and_one_of_one_end_with_the_same_weights() -> None:
    done = torch_process.run(["examples/torchrun_replica.py"], cwd=ROOT, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    sums = dict(
        re.findall(r"(replica \d rank \d): completed, sum of weights (-?\d+\.\d+)", done.stdout)
    )
    assert sorted(sums) == ["replica 0 rank 0", "replica 0 rank 1", "replica 1 rank 0"]
    assert len(set(sums.values())) == 1


def test_a_custom_workload_trains_from_a_zip_on_the_path(tmp_path: Path) -> None:
    folder, uri = ROOT / "examples" / "custom_workload", tmp_path / "run"
    archive = tmp_path / "user.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(folder / "spirals.py", "spirals.py")
    own = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(archive), str(ROOT)])}
    settings = [
        "--num-replicas=2",
        "--sync-every=20",
        "--total-rounds=10",
        "--warmup-steps=0",
        "--inner-lr=0.01",
        "--batch-size=64",
        "--eval-every=10",
        "--grace-s=600",
    ]
    described = ["--workload", str(folder / "workload.json")]
    created = torch_process.run(
        ["-m", "diloco.init", uri, *described, *settings], cwd=tmp_path, env=own
    )
    assert created.returncode == 0, created.stderr
    log = tmp_path / "log.txt"
    replicas = [
        torch_process.start(
            ["-m", "diloco.replica", uri],
            cwd=tmp_path,
            env=own | {"REPLICA_RANK": str(number)},
            output=log,
        )
        for number in range(2)
    ]
    assert torch_process.wait(replicas) == [0, 0], log.read_text()
    (summary,) = [json.loads(file.read_text()) for file in uri.glob("final/*/summary.json")]
    assert summary["reason"] == "completed"
    assert summary["eval_loss"] < 0.6, "guessing is 0.69"


@pytest.mark.parametrize(("name", "steps"), [("train_ddp.py", 30), ("train_diloco.py", 8)])
def test_a_loop_with_a_manager_ends_with_the_same_weights_on_both_replicas(
    name: str, steps: int
) -> None:
    done = torch_process.run([f"examples/{name}"], cwd=ROOT, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    sums = re.findall(rf"replica \d: {steps} steps, sum of weights (-?\d+\.\d+)", done.stdout)
    assert len(sums) == 2 and sums[0] == sums[1], done.stdout
