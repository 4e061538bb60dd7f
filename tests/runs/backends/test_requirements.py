"""Packages that a replica needs in its image."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from runs.backends.requirements import CLIENTS, KINDS, TORCH, replica_requirements

ROOT = Path(__file__).resolve().parents[3]


class Run:
    def __init__(self, rendezvous: str, workload: dict[str, Any] | None = None) -> None:
        self.rendezvous = rendezvous
        self.workload = workload or {}


@pytest.mark.parametrize("python", ["3.11.7", "3.13.0"])
@pytest.mark.parametrize("scheme", [*sorted(CLIENTS), "file"])
def test_client_of_each_scheme_is_pinned_for_each_python(scheme: str, python: str) -> None:
    result = replica_requirements(Run(f"{scheme}://bucket/run"), remote=True)  # type: ignore[arg-type]
    lines = [Requirement(line) for line in result]
    here = [
        line
        for line in lines
        if line.marker is None or line.marker.evaluate({"python_full_version": python})
    ]
    assert all(re.fullmatch(r"==[\w.+-]+", str(line.specifier)) for line in here)
    names = [line.name.lower().replace("_", "-") for line in here]
    assert names[:5] == ["torch", "fsspec", "numpy", "safetensors", "xxhash"]
    assert names[5:] == [name.replace("_", "-") for name in CLIENTS.get(scheme, ())]


def test_transformers_workload_adds_its_packages() -> None:
    run = Run("s3://bucket/run", {"kind": "huggingface"})
    result = replica_requirements(run, remote=True)  # type: ignore[arg-type]
    tested = (ROOT / "requirements" / "dev.txt").read_text()
    assert {"transformers", "tokenizers", "datasets"} <= {Requirement(r).name for r in result}
    for line in KINDS["huggingface"]:
        assert line in result
        assert re.search(rf"^{re.escape(line)}$", tested, re.MULTILINE), line
    assert replica_requirements(run, remote=False) == ()  # type: ignore[arg-type]


def test_local_job_needs_only_the_packages_of_the_workload() -> None:
    run = Run("s3://bucket/run", {"requirements": ["einops==0.8.1"]})
    assert replica_requirements(run, remote=False) == ("einops==0.8.1",)  # type: ignore[arg-type]
    assert replica_requirements(run, remote=True)[-1] == "einops==0.8.1"  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["scripts/bootstrap.py", "docker/replica.Dockerfile"])
def test_torch_version_matches_the_tested_one(path: str) -> None:
    version = TORCH.partition("==")[2]
    assert re.search(
        rf'^(ARG )?TORCH ?= ?"?{re.escape(version)}"?$', (ROOT / path).read_text(), re.M
    )
