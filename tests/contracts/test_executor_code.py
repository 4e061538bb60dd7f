"""Jobs with code from the bucket: the command of every executor fetches, checks and runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from executors.base import CodeRef, ReplicaSpec
from tests.executors.bundles import code_in
from tests.executors.harnesses import Harness, end_of, every_harness, text_of

pytestmark = pytest.mark.processes


def launch(harness: Harness, code: CodeRef, cache: Path, *args: str) -> tuple[object, list[str]]:
    executor = harness.executor()
    (handle,) = executor.launch_replicas(
        1,
        "bundled",
        {"args": args},
        specs=[ReplicaSpec(launch_key="run-4-1", replica=4)],
        env={"DILOCO_CODE_DIR": str(cache)},
        code=code,
    )
    status = end_of(executor, handle)
    return status.exit_code, text_of(executor, handle)


@every_harness()
def test_code_of_the_rendezvous_runs(harness: Harness, tmp_path: Path) -> None:
    code = code_in(tmp_path / "run")
    exit_code, output = launch(harness, code, tmp_path / "cache", "a b", "$(HOME)")
    assert exit_code == 0, output
    assert 'ran [["a b", "$(HOME)"], "4"]' in output


@every_harness("exit_code")
def test_damaged_code_does_not_run(harness: Harness, tmp_path: Path) -> None:
    code = code_in(tmp_path / "run")
    (tmp_path / "run" / "code" / f"{code.sha256}.zip").write_bytes(b"damaged")
    exit_code, output = launch(harness, code, tmp_path / "cache")
    assert exit_code == 78
    assert any(f"expected sha256 {code.sha256}" in line for line in output)
