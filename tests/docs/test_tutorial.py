"""The tutorial works as it is written, from the wheel in an empty virtual environment.

Nothing is downloaded: the packages that the wheel requires are those of this environment.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from scripts import try_tutorial
from scripts.try_tutorial import OWN_MODEL
from tests.wheel import build_wheel

USED = ("PATH", "HOME", "TMPDIR", "OMP_NUM_THREADS", "PYTHONPYCACHEPREFIX")


def test_it_has_less_than_20_lines_to_type() -> None:
    assert OWN_MODEL.typed_lines < 20
    script = [line for line in OWN_MODEL.scripts["train.py"].splitlines() if line]
    assert len(OWN_MODEL.commands) == 5
    assert f"five commands and a script of {len(script)} lines" in OWN_MODEL.text


@pytest.mark.slow(minutes=1)
def test_two_replicas_train_from_the_wheel(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    packages = sysconfig.get_paths()["purelib"]
    programs = Path(sys.executable).parent
    environment = {name: os.environ[name] for name in USED if name in os.environ}
    environment |= {
        "PATH": f"{programs}:{environment['PATH']}",  # its python3 can import the packages
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    try:
        shown = try_tutorial.run(
            OWN_MODEL,
            build_wheel(tmp_path_factory).parent,
            tmp_path,
            after_first=(  # the setuptools of a new environment is older than torch's
                f"cd venv/lib/python*/site-packages && echo {packages} >here.pth"
                " && rm -rf setuptools* && cd - >/dev/null"
            ),
            environment=environment,
        )
    except subprocess.CalledProcessError as error:
        pytest.fail(f"status {error.returncode}:\n{error.output}")
    assert sorted(re.findall(r"replica (\d+) joins run", shown)) == ["0", "1"], shown
    assert len(re.findall(r"^round \d+ .* 20/20 committed .* 2 contributors", shown, re.M)) == 2
