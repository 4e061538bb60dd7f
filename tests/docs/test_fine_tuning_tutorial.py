"""The fine-tuning tutorial works as it is written, on a small model and without a download.

``tutorial_program.py`` runs its Python commands once for this module, with the local S3 of the
tests. The Hub is an emulator that has the small model under the tutorial's name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from typing import Any

import pytest

from tests.docs.fine_tuning_model import NAME, ROOT, TUTORIAL, model_files, write_text
from tests.model_hub import running_model_hub

SET_UP = 4
"""Commands that create the environment and start the server. ``test_tutorial.py`` runs the same
ones."""


def test_its_lines_are_counted_as_it_states() -> None:
    assert len(TUTORIAL.commands) == 11
    assert set(TUTORIAL.scripts) == {"finetune.py", "compare.py"}
    assert "eleven commands and two scripts" in TUTORIAL.text
    own_model = (TUTORIAL.page.parent / "your-own-model.md").read_text()
    for line in (TUTORIAL.commands[0], *TUTORIAL.commands[2:SET_UP]):
        assert line in own_model.splitlines()


@pytest.fixture(scope="module")
def shown(s3: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of the commands."""
    folder = tmp_path_factory.mktemp("fine-tuning")
    place = f"s3://{s3.bucket}/{uuid.uuid4().hex}/"
    write_text(folder)
    for name, text in TUTORIAL.scripts.items():
        (folder / name).write_text(text.replace("s3://runs/", place))
    commands = "\n".join(TUTORIAL.commands[SET_UP:])
    (folder / "commands").write_text(commands.replace("s3://runs/", place))
    with running_model_hub() as hub:
        hub.others[NAME] = model_files(folder / "base")
        environment = os.environ | s3.env | hub.env
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": str(folder)}
        done = subprocess.run(
            [sys.executable, "-m", "tests.docs.tutorial_program", str(folder)],
            env=environment, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.processes
@pytest.mark.slow(minutes=2)
def test_the_merged_model_of_two_replicas_has_learned_the_text(shown: str) -> None:
    before, after = (
        float(re.findall(rf"^{name}: (\d+\.\d+) nats", shown, re.M)[0])
        for name in ("before", "after")
    )
    assert after < before - 0.5
    generated = [line for line in shown.splitlines() if line.strip()][-1]
    assert len(generated.split()) == 32 + 32


@pytest.mark.processes
@pytest.mark.slow(minutes=2)
def test_the_payloads_are_the_adapters(shown: str) -> None:
    [trained] = set(re.findall(r"trainable params: ([\d,]+)", shown))
    both_bytes = 2 * 2 * int(trained.replace(",", ""))
    rounds = re.findall(r"^ +\d+ +0 +committed.* ([\d.]+) kB ", shown, re.M)
    assert len(rounds) == 8, shown
    for payloads_kb in map(float, rounds):
        assert both_bytes <= payloads_kb * 1e3 < both_bytes * 1.1
