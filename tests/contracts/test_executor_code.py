"""Jobs that bring their code: every executor's command fetches it, checks it and runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from executors.base import CodeRef, ReplicaSpec
from tests.executors.bundles import code_in
from tests.executors.worlds import World, end_of, every_world, text_of

pytestmark = pytest.mark.processes


def launch(world: World, code: CodeRef, kept: Path, *args: str) -> tuple[object, list[str]]:
    executor = world.executor()
    (handle,) = executor.launch_replicas(
        1,
        "bundled",
        {"args": args},
        specs=[ReplicaSpec(launch_key="run-4-1", replica=4)],
        env={"DILOCO_CODE_DIR": str(kept)},
        code=code,
    )
    status = end_of(executor, handle)
    return status.exit_code, text_of(executor, handle)


@every_world()
def test_the_code_of_the_rendezvous_is_run(world: World, tmp_path: Path) -> None:
    code = code_in(tmp_path / "run")
    exit_code, said = launch(world, code, tmp_path / "kept", "a b", "$(HOME)")
    assert exit_code == 0, said
    assert 'ran [["a b", "$(HOME)"], "4"]' in said


@every_world("exit_code")
def test_damaged_code_is_never_run(world: World, tmp_path: Path) -> None:
    code = code_in(tmp_path / "run")
    (tmp_path / "run" / "code" / f"{code.sha256}.zip").write_bytes(b"damaged")
    exit_code, said = launch(world, code, tmp_path / "kept")
    assert exit_code == 78
    assert any(f"expected sha256 {code.sha256}" in line for line in said)
