"""The examples run as they are written, and do what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def test_own_loop_ends_with_the_same_weights_on_both_replicas() -> None:
    done = subprocess.run(
        [sys.executable, "examples/own_loop.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    weights = re.findall(r"replica \d: completed, weights \[(.*)\]", done.stdout)
    assert len(weights) == 2 and weights[0] == weights[1]
    found = [float(value) for value in weights[0].split(", ")]
    assert all(abs(a - b) < 0.2 for a, b in zip(found, [2.0, -1.0, 0.5, 3.0], strict=True))


def test_a_replica_of_two_ranks_and_one_of_one_end_with_the_same_weights() -> None:
    done = subprocess.run(
        [sys.executable, "examples/torchrun_replica.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    sums = dict(
        re.findall(r"(replica \d rank \d): completed, sum of weights (-?\d+\.\d+)", done.stdout)
    )
    assert sorted(sums) == ["replica 0 rank 0", "replica 0 rank 1", "replica 1 rank 0"]
    assert len(set(sums.values())) == 1


def test_a_workload_of_ones_own_trains_from_a_zip_on_the_path(tmp_path: Path) -> None:
    folder, uri = ROOT / "examples" / "custom_workload", tmp_path / "run"
    archive = tmp_path / "user.zip"
    with zipfile.ZipFile(archive, "w") as made:
        made.write(folder / "spirals.py", "spirals.py")
    own = os.environ | {"PYTHONPATH": os.pathsep.join([str(archive), str(ROOT)])}
    settings = [
        "--num-replicas=2", "--sync-every=20", "--total-rounds=10", "--warmup-steps=0",
        "--inner-lr=0.01", "--batch-size=64", "--eval-every=10", "--grace-s=600",
    ]  # fmt: skip
    described = ["--workload", str(folder / "workload.json")]
    subprocess.run(
        [sys.executable, "-m", "diloco.init", str(uri), *described, *settings],
        cwd=tmp_path, env=own, check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    replicas = [
        subprocess.Popen(
            [sys.executable, "-m", "diloco.replica", str(uri)],
            cwd=tmp_path,
            env=own | {"REPLICA_RANK": str(number), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        errors = [replica.communicate(timeout=240)[1] for replica in replicas]
    finally:
        for replica in replicas:
            replica.kill()
    assert [replica.returncode for replica in replicas] == [0, 0], errors
    (summary,) = [json.loads(file.read_text()) for file in uri.glob("final/*/summary.json")]
    assert summary["reason"] == "completed"
    assert summary["eval_loss"] < 0.6, "guessing is 0.69"


@pytest.mark.parametrize(("name", "steps"), [("train_ddp.py", 30), ("train_diloco.py", 8)])
def test_a_loop_with_a_manager_ends_with_the_same_weights_on_both_replicas(
    name: str, steps: int
) -> None:
    done = subprocess.run(
        [sys.executable, f"examples/{name}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    sums = re.findall(rf"replica \d: {steps} steps, sum of weights (\S+)", done.stdout)
    assert len(sums) == 2 and sums[0] == sums[1], done.stdout
