"""Runs the Python commands of a tutorial; see ``test_fine_tuning_tutorial.py``.

    python -m tests.docs.tutorial_program FOLDER

FOLDER has the scripts of the tutorial, and ``commands`` with its commands. The libraries are
imported once. Each command is a process forked from this one, with its output in
``FOLDER/<number>.log``; those joined by ``&`` run at once. The first that fails ends the program,
with its status.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import shlex
import sys
from pathlib import Path

from tests.torch_process import execute, wait

IMPORTED = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.trainer",
    "peft",
    "diloco.group",
    "diloco.integrations.transformers",
)


def python_command(text: str) -> tuple[list[str], dict[str, str]]:
    """The arguments of Python, and the variables before it."""
    words = [os.path.expandvars(word) for word in shlex.split(text)]
    variables: dict[str, str] = {}
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    assert words.pop(0) == "python", text
    return words, variables


def main(folder: Path) -> int:
    for module in IMPORTED:
        importlib.import_module(module)
    context = multiprocessing.get_context("fork")
    for number, line in enumerate((folder / "commands").read_text().splitlines()):
        if line.startswith("export "):
            os.environ |= dict(word.split("=", 1) for word in shlex.split(line)[1:])
            continue
        log, processes = folder / f"{number}.log", []
        for text in re.split(r" & ", line):
            words, variables = python_command(text)
            env = {**os.environ, **variables}
            process = context.Process(target=execute, args=(words, env, folder, log, log))
            process.start()
            processes.append(process)
        codes = wait(processes)
        print(f"$ {line}\n{log.read_text()}", flush=True)
        if any(codes):
            return max(codes)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
