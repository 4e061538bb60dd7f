"""Python programs that run in a process forked from one that has imported torch.

Importing torch, and the compiler that an optimizer imports at its first step, takes three seconds
of CPU. The fork server imports both once in a test session and computes nothing, so its children
still choose their CPU capability and their number of threads, from their own environment. What a
program starts by the method *spawn* of :mod:`multiprocessing` is forked from it, too.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from multiprocessing import context, popen_fork, spawn
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "safetensors.torch",
    __name__,
]


def start(
    arguments: Sequence[str | Path],
    *,
    env: Mapping[str, str],
    output: Path,
    errors: Path | None = None,
    cwd: Path | None = None,
) -> BaseProcess:
    """Start ``python`` with these arguments: ``PROGRAM ...``, ``-m MODULE ...`` or ``-c CODE``.

    Args:
        env: The whole environment.
        output: The standard output is appended to this file.
        errors: The same for the standard error output, by default ``output``.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    words = [str(argument) for argument in arguments]
    process = server.Process(
        target=execute, args=(words, dict(env), cwd or Path.cwd(), output, errors or output)
    )
    process.start()
    return process


def run(
    arguments: Sequence[str | Path],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    timeout_s: float = 600.0,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with the arguments of :func:`start`, and capture its output."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        process = start(arguments, env=env, output=output, errors=errors, cwd=cwd)
        code = wait([process], timeout_s)[0]
        return subprocess.CompletedProcess(
            list(arguments), code, output.read_text(), errors.read_text()
        )


def wait(processes: Sequence[BaseProcess], timeout_s: float = 600.0) -> list[int]:
    """Return the exit codes of processes. Those that run after the timeout are killed: -9."""
    try:
        for process in processes:
            process.join(timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [process.exitcode or 0 for process in processes]


def execute(
    arguments: list[str], env: dict[str, str], cwd: Path, output: Path, errors: Path
) -> None:
    """Become the program, in the forked process."""
    gc.freeze()  # scanning the preloaded modules would copy their memory
    context._concrete_contexts["spawn"] = SpawnContext()  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # that of the fork server
    os.chdir(cwd)
    for path, descriptor in ((output, 1), (errors, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, descriptor)
        os.close(file)
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
    match arguments:
        case ["-c", code, *rest]:
            sys.argv, sys.path[:0] = ["-c", *rest], [""]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case ["-m", module, *rest]:
            sys.argv, sys.path[:0] = ["-m", *rest], [str(cwd)]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [program, *rest]:
            sys.argv, sys.path[:0] = [program, *rest], [str(Path(program).parent)]
            runpy.run_path(program, run_name="__main__")


class SpawnPopen(popen_fork.Popen):
    """A fork that begins as a spawned process does: the main module is imported again, under
    another name, and the process object comes out of a pickle."""

    def _launch(self, process_obj: Any) -> None:
        context.set_spawning_popen(self)
        try:
            pickled = bytes(ForkingPickler.dumps(process_obj))
        finally:
            context.set_spawning_popen(None)
        super()._launch(Pickled(pickled, sys.modules["__main__"].__file__))


class Pickled:
    """A process object, with the path of its main module."""

    def __init__(self, pickled: bytes, main: str | None) -> None:
        self._pickled, self._main = pickled, main

    def _bootstrap(self, parent_sentinel: int) -> Any:
        sys.modules["__main__"] = types.ModuleType("__main__")
        if self._main is not None:
            spawn._fixup_main_from_path(self._main)  # type: ignore[attr-defined]
        return pickle.loads(self._pickled)._bootstrap(parent_sentinel)


class SpawnProcess(BaseProcess):
    _start_method = "spawn"
    _Popen = SpawnPopen


class SpawnContext(context.BaseContext):
    _name = "spawn"
    Process = SpawnProcess
