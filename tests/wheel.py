"""Builds the wheel of the library from a copy of the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKED = ("archipelago", "diloco")


def build_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy, because setuptools leaves files beside the sources."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKED:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("runs", "dashboard", "executors"):  # present as in the repository; not packed
        (copy / name).mkdir()
        (copy / name / "__init__.py").touch()
    command = [
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"),
        *("--no-build-isolation", "--wheel-dir", str(out), str(copy)),
    ]
    subprocess.run(command, check=True, cwd=out)
    (built,) = out.iterdir()
    return built
