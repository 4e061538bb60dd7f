"""MLflow, by its REST API: https://mlflow.org/docs/latest/rest-api.html.

MLflow stores a metric under (run, name, step, timestamp, value) and ignores one that it has
already, so a repeated batch changes nothing. The run is found by the tag :data:`TAG` after a crash
between its creation and the answer."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from diloco.trackers.base import (
    BATCH_VALUES,
    MirroredRun,
    Open,
    Outcome,
    TrackerError,
    TrackerRow,
    json_number,
)
from diloco.trackers.http import HttpError, JsonClient, default_open

TAG = "archipelago.run"
PARAMS = 100
"""Parameters in one request, and characters of a value below."""
PARAM_LENGTH = 500
_API = "api/2.0/mlflow"
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_STATUS: dict[Outcome, str] = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


class MLflowTracker:
    """One run of an experiment.

    Args:
        server: address of the tracking server.
        experiment: its name; it is created if it does not exist.
        secrets: ``MLFLOW_TRACKING_TOKEN``, or ``MLFLOW_TRACKING_USERNAME`` and
            ``MLFLOW_TRACKING_PASSWORD``, or nothing.
    """

    def __init__(
        self,
        server: str,
        experiment: str,
        *,
        secrets: Mapping[str, str] | None = None,
        open: Open = default_open,
    ) -> None:
        self._server = server.rstrip("/")
        self._experiment = experiment
        self._client = JsonClient(server, headers=_authorization(secrets or {}), open=open)

    def start(self, run: MirroredRun, state: dict[str, Any]) -> dict[str, Any]:
        experiment = self._experiment_id()
        run_id = self._find(experiment, run) or self._create(experiment, run)
        params = [
            {"key": name, "value": str(value)[:PARAM_LENGTH]} for name, value in run.config.items()
        ]
        for first in range(0, len(params), PARAMS):
            self._client.post(
                f"{_API}/runs/log-batch",
                {"run_id": run_id, "params": params[first : first + PARAMS]},
            )
        return {"experiment_id": experiment, "run_id": run_id}

    def log(
        self, run: MirroredRun, rows: Sequence[TrackerRow], state: dict[str, Any]
    ) -> dict[str, Any]:
        metrics = [
            {
                "key": name,
                "value": json_number(value),
                "timestamp": round(row.wall_s * 1000),
                "step": row.step,
            }
            for row in rows
            for name, value in row.named_values().items()
        ]
        for first in range(0, len(metrics), BATCH_VALUES):  # a row can have more
            part = metrics[first : first + BATCH_VALUES]
            self._client.post(
                f"{_API}/runs/log-batch", {"run_id": state["run_id"], "metrics": part}
            )
        return state

    def finish(self, run: MirroredRun, outcome: Outcome, state: dict[str, Any]) -> dict[str, Any]:
        body = {"run_id": state["run_id"], "status": _STATUS[outcome]}
        self._client.post(f"{_API}/runs/update", body)
        return state

    def url(self, state: Mapping[str, Any]) -> str:
        if "run_id" not in state:
            return ""
        return f"{self._server}/#/experiments/{state['experiment_id']}/runs/{state['run_id']}"

    def _experiment_id(self) -> str:
        path = f"{_API}/experiments/get-by-name?experiment_name={quote(self._experiment, safe='')}"
        try:
            return _id(self._client.get(path), "experiment", "experiment_id")
        except HttpError as error:
            if error.status != 404:
                raise
        body = {"name": self._experiment}
        return _id(self._client.post(f"{_API}/experiments/create", body), "experiment_id")

    def _find(self, experiment: str, run: MirroredRun) -> str:
        found = self._client.post(
            f"{_API}/runs/search",
            {
                "experiment_ids": [experiment],
                "filter": f"tags.`{TAG}` = '{run.id}'",
                "max_results": 1,
            },
        )
        return _id(found, "runs", 0, "info", "run_id") if found.get("runs") else ""

    def _create(self, experiment: str, run: MirroredRun) -> str:
        tags = [{"key": TAG, "value": run.id}]
        tags += [{"key": f"tag.{tag}"[:250], "value": "true"} for tag in run.tags]
        created = self._client.post(
            f"{_API}/runs/create",
            {
                "experiment_id": experiment,
                "run_name": run.name,
                "start_time": round(run.started_s * 1000),
                "tags": tags,
            },
        )
        return _id(created, "run", "info", "run_id")


def _id(answer: Any, *path: str | int) -> str:
    """The identifier at ``path`` of an answer. Raises :class:`TrackerError` for another answer."""
    for part in path:
        try:
            answer = answer[part]
        except (KeyError, IndexError, TypeError):
            answer = None
    if not isinstance(answer, str | int) or not _ID.fullmatch(str(answer)):
        raise TrackerError(f"expected an answer of MLflow with {path[-1]}, found another")
    return str(answer)


def _authorization(secrets: Mapping[str, str]) -> dict[str, str]:
    if token := secrets.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    if name := secrets.get("MLFLOW_TRACKING_USERNAME"):
        pair = f"{name}:{secrets.get('MLFLOW_TRACKING_PASSWORD', '')}".encode()
        return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}
    return {}
