"""A trackio server (https://huggingface.co/docs/trackio), by the HTTP API of its own client.

Each row has a ``log_id``. The server has a unique index on it and ignores a row that it has
already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from diloco.trackers.base import MirroredRun, Open, Outcome, TrackerError, TrackerRow, json_number
from diloco.trackers.http import JsonClient, default_open


class TrackioTracker:
    """One run of a project.

    Args:
        server: address of the server, as ``trackio show`` prints it, without the token.
        project: name of the project.
        secrets: ``TRACKIO_WRITE_TOKEN`` of the server, or ``HF_TOKEN`` for a Space.
    """

    def __init__(
        self,
        server: str,
        project: str,
        *,
        secrets: Mapping[str, str] | None = None,
        open: Open = default_open,
    ) -> None:
        secrets = secrets or {}
        headers = {}
        if token := secrets.get("TRACKIO_WRITE_TOKEN"):
            headers["x-trackio-write-token"] = token
        if token := secrets.get("HF_TOKEN"):
            headers["Authorization"] = f"Bearer {token}"
        self._hf_token = secrets.get("HF_TOKEN")
        self._server = server.rstrip("/")
        self._project = project
        self._client = JsonClient(server, headers=headers, open=open)

    def start(self, run: MirroredRun, state: dict[str, Any]) -> dict[str, Any]:
        config = dict(run.config) | {
            "started": datetime.fromtimestamp(run.started_s, UTC).isoformat()
        }
        return {"config": {name: str(value) for name, value in config.items()}}

    def log(
        self, run: MirroredRun, rows: Sequence[TrackerRow], state: dict[str, Any]
    ) -> dict[str, Any]:
        logs = [
            {
                "project": self._project,
                "run": run.name,
                "run_id": run.id,
                "metrics": {name: json_number(value) for name, value in row.named_values().items()},
                "step": row.step,
                "config": state.get("config") if row.number == 0 else None,
                "log_id": f"{run.id}-{row.number}",
            }
            for row in rows
        ]
        body = {"args": [], "kwargs": {"logs": logs, "hf_token": self._hf_token}}
        answer = self._client.post("api/bulk_log", body)
        if answer.get("error") is not None:
            raise TrackerError(f"{self._server} refused the rows: {str(answer['error'])[:300]}")
        return state

    def finish(self, run: MirroredRun, outcome: Outcome, state: dict[str, Any]) -> dict[str, Any]:
        """Nothing: trackio has no state of a run."""
        return state

    def url(self, state: Mapping[str, Any]) -> str:
        return f"{self._server}/?project={quote(self._project, safe='')}"
