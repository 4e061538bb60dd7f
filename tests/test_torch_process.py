"""The fork server of :mod:`tests.torch_process`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests import torch_process

pytestmark = pytest.mark.processes

PROGRAM = """
import os, sys, threading
import torch
print(len(os.listdir("/proc/self/task")), torch.backends.cpu.get_cpu_capability())
print(os.getcwd(), sys.argv, __name__, os.environ.get("HOME"))
print("to the other stream", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("limited", [True, False])
def test_a_program_has_its_own_environment_capability_and_streams(
    tmp_path: Path, limited: bool
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    env = {"ATEN_CPU_CAPABILITY": "default"} if limited else {}
    capability = "DEFAULT" if limited else torch.backends.cpu.get_cpu_capability()
    done = torch_process.run([program, "argument"], env=env, cwd=tmp_path)
    assert done.returncode == 7
    assert done.stdout.splitlines() == [
        f"1 {capability}",
        f"{tmp_path} {[str(program), 'argument']} __main__ None",
    ]
    assert done.stderr == "to the other stream\n"


def test_modules_and_code_are_found_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("import sys; print(__name__, sys.argv[1:])")
    env = {"PYTHONPATH": str(tmp_path)}
    assert torch_process.run(["-m", "module", "a"], env=env).stdout == "__main__ ['a']\n"
    assert torch_process.run(["-c", "import module", "b"], env=env).stdout == "module ['b']\n"


def test_a_failed_program_shows_its_traceback_and_a_slow_one_is_killed() -> None:
    failed = torch_process.run(["-c", "raise KeyError('no key')"], env=dict(os.environ))
    assert failed.returncode == 1
    assert "KeyError: 'no key'" in failed.stderr
    forever = ["-c", "import signal; signal.pause()"]
    slow = torch_process.run(forever, env=dict(os.environ), timeout_s=0.1)
    assert slow.returncode == -signal.SIGKILL


SPAWNING = """
import multiprocessing, sys

def show(text):
    print(__name__, text, "torch" in sys.modules, flush=True)
    sys.exit(3)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=show, args=("from a process",))
    process.start()
    process.join()
    print(process.exitcode)
    try:
        context.Process(target=lambda: None).start()
    except Exception as error:
        print(error)
"""


def test_a_spawned_process_is_a_fork_with_its_own_main_module(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SPAWNING)
    done = torch_process.run([program], env={})
    assert done.stdout.splitlines()[:2] == ["__mp_main__ from a process True", "3"], done.stderr
    assert "pickle" in done.stdout.splitlines()[2]
