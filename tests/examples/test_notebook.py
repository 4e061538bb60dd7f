"""The notebook runs from its first cell to its last."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests import torch_process

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "own_model.ipynb"


def cells() -> list[str]:
    document = json.loads(NOTEBOOK.read_text())
    return ["".join(c["source"]) for c in document["cells"] if c["cell_type"] == "code"]


def test_it_has_no_outputs() -> None:
    document = json.loads(NOTEBOOK.read_text())
    assert not any(cell.get("outputs") for cell in document["cells"])


@pytest.mark.slow(minutes=1)
def test_all_cells_run(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    environment["PYTHONPATH"] = str(NOTEBOOK.parents[1])
    done = torch_process.run(["-c", "\n".join(cells())], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "15 rounds" in done.stdout
    assert "perplexity" in done.stdout
