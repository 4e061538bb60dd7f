"""Client of the HTTP API. Blocking; one client can be shared by threads."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from archipelago.errors import NotFound
from archipelago.evaluation_rows import EvaluationPlan
from archipelago.list_rows import BulkOutcome, BulkResult
from archipelago.login import check_url, read_login
from archipelago.read_client import ReadClient
from archipelago.rows import (
    Done,
    Pool,
    Run,
    RunHeader,
    Scaled,
)
from archipelago.sweep_rows import RankedSweep
from archipelago.transport import Http

POLL_S = 2.0
SHORTEST = 4
"""Minimum length of an id prefix that identifies a run."""


class Client(ReadClient):
    """Methods of the API: ``client.submit(document)``, ``client.watch(run.id)`` and so on.

    Every method raises :class:`~archipelago.errors.ApiError` if the server is unreachable or
    rejects the request.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_s: float = 30.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = check_url(url)
        self.sleep = sleep
        self._http = Http(url=self.url, token=token, timeout_s=timeout_s, sleep=sleep)

    @classmethod
    def from_login(cls, **options: Any) -> Client:
        """A client for the server of ``archipelago login`` or of the environment variables."""
        login = read_login()
        return cls(login.url, login.token, **options)

    # Write.

    def submit(self, document: Mapping[str, Any] | str, *, key: str | None = None) -> Run:
        """Create a run from the document and launch it. Text is YAML, which the server parses.

        ``key`` is the idempotency key: the same key returns the same run. By default a random key
        is sent, so that a retry after a lost response creates no second run.
        """
        headers = {"Idempotency-Key": key or secrets.token_urlsafe(24)}
        return Run.of(self._send_document("/runs", document, headers=headers))

    def plan(self, document: Mapping[str, Any] | str, *, ask: bool = True) -> dict[str, Any]:
        """``estimate`` and ``problems`` of a document; nothing is started. ``ask=False`` skips the
        checks that call backends and the bucket."""
        plan: dict[str, Any] = self._send_document(
            "/plan", document, query={"ask": "true" if ask else "false"}
        )
        return plan

    def _send_document(
        self,
        path: str,
        document: Mapping[str, Any] | str,
        *,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, Any] | None = None,
    ) -> Any:
        """Send a document; the request can be repeated."""
        if isinstance(document, str):
            body: dict[str, Any] = {"data": document.encode()}
            headers = {**(headers or {}), "Content-Type": "application/yaml"}
        else:
            body = {"body": dict(document)}
        return self._http.call(
            "POST", path, headers=dict(headers or {}), query=query, again=True, **body
        )[1]

    def sweep(self, document: Mapping[str, Any], *, key: str | None = None) -> RankedSweep:
        """Create a run for each combination of values; see ``docs/api.md``. ``key`` as in
        :meth:`submit`."""
        _, response = self._http.call(
            "POST",
            "/sweeps",
            body=dict(document),
            headers={"Idempotency-Key": key or secrets.token_urlsafe(24)},
            again=True,
        )
        return RankedSweep.of(response)

    def plan_sweep(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Estimate and problems of a sweep; nothing is started."""
        _, response = self._http.call("POST", "/sweeps/plan", body=dict(document), again=True)
        plan: dict[str, Any] = response
        return plan

    def stop_sweep(self, sweep: str) -> int:
        """Stop all runs of a sweep. Returns the number of runs that were stopped now."""
        return int(self._post(f"/sweeps/{quote(sweep)}/stop", {})["stopped"])

    def upload(self, data: bytes) -> str:
        """Upload a zip of Python files. Returns its sha256, for ``archive`` of a workload."""
        _, response = self._http.call(
            "POST", "/archives", data=data, headers={"Content-Type": "application/zip"}, again=True
        )
        return str(response["sha256"])

    def act_on_runs(
        self,
        action: str,
        *,
        count: int,
        ids: Sequence[str] | None = None,
        query: str | None = None,
        **options: Any,
    ) -> list[BulkOutcome]:
        """Apply ``stop``, ``archive``, ``restore``, ``tag`` or ``delete`` to the runs with the ids,
        or to all that match the query. ``count`` must be their number, as a confirmation.
        ``options``: ``reason``, ``tags``, ``objects``."""
        selected = {"query": query} if ids is None else {"ids": [*ids]}
        body = {"action": action, "count": count, **selected, **options}
        return BulkResult.of(self._post("/runs/bulk", body)).results

    def stop(self, run: str, *, reason: str = "", force: bool = False) -> Done:
        return self._act(run, "stop", reason=reason, force=force)

    def acknowledge_alert(self, run: str, alert: int) -> Done:
        """Mark an alert as seen by the caller, who takes care of it."""
        return self._act(run, f"alerts/{int(alert)}/acknowledge")

    def mirror(self, run: str, tracker: str) -> Done:
        """Mirror the run's metrics to a tracker."""
        return self._act(run, "mirrors", tracker=tracker)

    def stop_mirror(self, run: str, tracker: str) -> Done:
        return self._act(run, "mirrors/stop", tracker=tracker)

    def save_evaluation_plan(self, run: str, plan: Mapping[str, Any]) -> EvaluationPlan:
        """Evaluate the run's checkpoints, or change the evaluation with that ``name``."""
        return EvaluationPlan.of(self._post(f"/runs/{quote(run)}/evaluation-plans", dict(plan)))

    def remove_evaluation_plan(self, run: str, name: str) -> Done:
        return self._act(run, "evaluation-plans/remove", name=name)

    def evaluate(self, run: str, name: str, round: int | None = None) -> Done:
        """Evaluate a checkpoint now, by default the newest."""
        return self._act(run, "evaluate", name=name, round=round)

    def cancel_evaluation(self, run: str, name: str, round: int) -> Done:
        return self._act(run, "evaluate/cancel", name=name, round=round)

    def pause(self, run: str) -> Done:
        return self._act(run, "pause")

    def resume(self, run: str) -> Done:
        return self._act(run, "resume")

    def save(self, run: str) -> Done:
        return self._act(run, "save")

    def describe(
        self,
        run: str,
        *,
        notes: str | None = None,
        tags: Sequence[str] | None = None,
        archived: bool | None = None,
    ) -> Done:
        """Change the fields that are not None."""
        fields = {"notes": notes, "tags": None if tags is None else [*tags], "archived": archived}
        given = {name: value for name, value in fields.items() if value is not None}
        return self._act(run, "describe", **given)

    def delete(self, run: str, *, name: str, objects: bool = False) -> Done:
        """Delete a finished run. ``name`` must equal the run's name, as a confirmation;
        ``objects``: also delete its objects in the bucket."""
        return self._act(run, "delete", name=name, objects=objects)

    def stop_replica(self, run: str, number: int, *, force: bool = False) -> Done:
        return self._act(run, f"replicas/{int(number)}/stop", force=force)

    def restart_replica(self, run: str, number: int, *, force: bool = False) -> Done:
        return self._act(run, f"replicas/{int(number)}/restart", force=force)

    def scale(self, run: str, pool: int, count: int) -> Scaled:
        return Scaled.of(
            self._post(f"/runs/{quote(run)}/pools/{int(pool)}/scale", {"count": count})
        )

    def add_pool(self, run: str, pool: Mapping[str, Any]) -> Pool:
        return Pool.of(self._post(f"/runs/{quote(run)}/pools", dict(pool)))

    # Wait.

    def watch(self, run: str, *, poll_s: float = POLL_S) -> Iterator[Run]:
        """Poll the run every ``poll_s`` seconds until it ends, and yield each version."""
        while True:
            matches = self.run(run)
            yield matches
            if matches.ended:
                return
            self.sleep(poll_s)

    def find(self, wanted: str) -> RunHeader:
        """A run by id, first characters of an id, name (the newest run with it), or ``last``.

        Raises :class:`NotFound` if there is none, or if an id prefix matches several.
        """
        if wanted == "last":
            newest = self.runs(limit=1).runs
            if not newest:
                raise NotFound("no runs yet")
            return newest[0]
        if len(wanted) == 36 and wanted.count("-") == 4:
            return self.run(wanted)
        named = [run for run in self.runs(name=wanted[:80], limit=200).runs if run.name == wanted]
        if named:
            return named[0]
        if len(wanted) < SHORTEST:
            raise NotFound(f"expected {SHORTEST} characters of an id, or a name, found {wanted!r}")
        matches = [run for run in self.every_run() if run.id.startswith(wanted.lower())]
        if len(matches) == 1:
            return matches[0]
        if not matches:
            raise NotFound(f"expected an id, the start of an id, or a name, found {wanted!r}")
        raise NotFound(f"expected one run, found {len(matches)} whose ids start with {wanted!r}")

    def _act(self, run: str, action: str, **body: Any) -> Done:
        return Done.of(self._post(f"/runs/{quote(run)}/{action}", body))

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._http.call("POST", path, body=body)[1]
