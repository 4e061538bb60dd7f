"""Weights & Biases, by its own library in a separate process.

The library starts threads and a service process, and can wait for a long time; a child process with
a time limit keeps that away from the caller. Rows carry their number as the step of ``wandb.log``.
The server knows the number of steps of a run that is resumed, and the library drops rows below it,
so a repeated batch adds nothing (https://docs.wandb.ai/models/runs/resuming).

In offline mode each batch is a separate folder, named after its first row; a repeated batch
replaces the folder. ``wandb sync`` uploads them in order."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.trackers.base import MirroredRun, Outcome, TrackerError, TrackerRow

TIMEOUT_S = 120.0
_MISSING = 3
"""Exit status of the child process without the library."""


class WandbTracker:
    """One run of a project.

    Args:
        project: name of the project; ``entity/project`` for a team.
        folder: where the library keeps its files, and in offline mode the runs to upload.
        server: address of the service, by default that of the library.
        offline: write files only.
        secrets: ``WANDB_API_KEY``.
        python: the interpreter that has the library.
    """

    def __init__(
        self,
        project: str,
        *,
        folder: Path,
        server: str = "",
        offline: bool = False,
        secrets: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self._python = python
        self._entity, _, self._project = project.rpartition("/")
        self._folder = folder
        self._server = server
        self._offline = offline
        self._secrets = dict(secrets or {})

    def start(self, run: MirroredRun, state: dict[str, Any]) -> dict[str, Any]:
        """Nothing: the first batch creates the run."""
        return state

    def log(
        self, run: MirroredRun, rows: Sequence[TrackerRow], state: dict[str, Any]
    ) -> dict[str, Any]:
        return {**state, **self._call(run, f"{rows[0].number:010d}", rows, None)}

    def finish(self, run: MirroredRun, outcome: Outcome, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, **self._call(run, "end", (), outcome)}

    def url(self, state: Mapping[str, Any]) -> str:
        return str(state.get("url") or "")

    def _call(
        self, run: MirroredRun, batch: str, rows: Sequence[TrackerRow], outcome: Outcome | None
    ) -> dict[str, Any]:
        folder = self._folder / run.id / batch
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        job = {
            "project": self._project,
            "entity": self._entity or None,
            "id": run.id,
            "name": run.name,
            "config": dict(run.config),
            "tags": list(run.tags),
            "folder": str(folder),
            "offline": self._offline,
            "rows": [row.to_dict() for row in rows],
            "outcome": outcome,
        }
        try:
            done = subprocess.run(
                [self._python, "-m", "diloco.trackers.wandb_process"],
                input=json.dumps(job),
                env=self._environment(),
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise TrackerError(
                f"Weights & Biases did not answer within {TIMEOUT_S:.0f} s"
            ) from None
        if done.returncode == _MISSING:
            raise TrackerError(
                'Weights & Biases needs the package wandb: pip install "archipelago-diloco[wandb]"'
            )
        if done.returncode:
            raise TrackerError(self._hide((done.stderr.strip().splitlines() or ["no output"])[-1]))
        if not self._offline:
            shutil.rmtree(folder, ignore_errors=True)
        return dict(json.loads(done.stdout.splitlines()[-1]))

    def _environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        if self._server:
            own["WANDB_BASE_URL"] = self._server
        return own | self._secrets | {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}

    def _hide(self, text: str) -> str:
        for secret in self._secrets.values():
            text = text.replace(secret, "***")
        return text[:500]
