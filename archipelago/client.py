"""Client of the HTTP API. Blocking; one client can be shared by threads."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from archipelago.errors import NotFound
from archipelago.evaluation_rows import Evaluation, EvaluationAttempt, EvaluationPlan
from archipelago.fleet_rows import FleetPage, LiveJob, Spend
from archipelago.frame_client import FrameClient
from archipelago.list_rows import RunGroups
from archipelago.login import check_url, read_login
from archipelago.rows import (
    Alert,
    DeletionPlan,
    Done,
    Event,
    LogLine,
    Me,
    Pool,
    Replica,
    Run,
    RunHeader,
    RunPage,
    Scaled,
)
from archipelago.run_page_rows import Activity, Finding
from archipelago.sweep_rows import RankedSweep, SweepPage
from archipelago.tracker_rows import Mirror, Tracker
from archipelago.transport import Http

POLL_S = 2.0
SHORTEST = 4
"""Minimum length of an id prefix that identifies a run."""


class Client(FrameClient):
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

    # Read.

    def me(self) -> Me:
        return Me.of(self._get("/me"))

    def backends(self) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self._get("/backends")
        return result

    def settings(self) -> list[dict[str, Any]]:
        """The schema of the group settings: name, default, bounds and help of each."""
        result: list[dict[str, Any]] = self._get("/settings")
        return result

    def runs(
        self,
        *,
        states: Sequence[str] = (),
        owner: str = "",
        backend: str = "",
        name: str = "",
        query: str = "",
        before: str | None = None,
        limit: int = 50,
    ) -> RunPage:
        """One page of runs, newest first.

        ``query`` has the syntax of the search field, e.g. ``state:running loss<3``. Archived runs
        are left out unless it includes them. ``before`` is the ``next`` of the previous page.
        """
        page = self._get(
            "/runs",
            state=list(states),
            owner=owner,
            backend=backend,
            name=name,
            q=query,
            before=before,
            limit=limit,
        )
        return RunPage(runs=[RunHeader.of(row) for row in page["runs"]], next=page["next"])

    def run_groups(self, by: str, *, query: str = "", limit: int = 50) -> RunGroups:
        """Runs that match a query as groups with totals. ``by`` is tag, owner, sweep, state or
        backend."""
        return RunGroups.of(self._get("/runs/groups", by=by, q=query, limit=limit))

    def every_run(self, **filters: Any) -> Iterator[RunHeader]:
        """All runs, fetched page by page as the iterator is consumed."""
        before: str | None = None
        while True:
            page = self.runs(before=before, limit=200, **filters)
            yield from page.runs
            if page.next is None:
                return
            before = page.next

    def run(self, run: str) -> Run:
        """One run, with its settings and pools."""
        return Run.of(self._get(f"/runs/{quote(run)}"))

    def info(self, run: str) -> dict[str, Any]:
        """What a client of the group must match: see ``docs/api.md``."""
        result: dict[str, Any] = self._get(f"/runs/{quote(run)}/info")
        return result

    def pools(self, run: str) -> list[Pool]:
        return self.run(run).pools

    def replicas(self, run: str) -> list[Replica]:
        return [Replica.of(row) for row in self._get(f"/runs/{quote(run)}/replicas")]

    def fleet(
        self,
        *,
        backend: str = "",
        owner: str = "",
        state: str = "",
        before: str | None = None,
        limit: int = 50,
    ) -> FleetPage:
        """One page of live jobs of all runs, with sums, pools with trouble, and orphaned jobs.

        ``before`` is the ``next`` of the previous page.
        """
        query = {"backend": backend, "owner": owner, "state": state, "before": before}
        return FleetPage.of(self._get("/fleet", limit=limit, **query))

    def every_job(self, page: FleetPage, **filters: Any) -> Iterator[LiveJob]:
        """The jobs of a page and of those after it, fetched as the iterator is consumed."""
        yield from page.jobs
        while page.next is not None:
            page = self.fleet(before=page.next, **filters)
            yield from page.jobs

    def spend(
        self,
        *,
        first: str | None = None,
        last: str | None = None,
        days: int | None = None,
        backend: str = "",
        owner: str = "",
        limit: int = 20,
    ) -> Spend:
        """Spending of the last ``days`` days, or from the day ``first`` to the day ``last``, both
        such as ``2026-01-31`` and in UTC."""
        query: dict[str, Any] = {"from": first, "to": last, "days": days}
        return Spend.of(self._get("/spend", backend=backend, owner=owner, limit=limit, **query))

    def events(self, run: str, *, after: int = 0, limit: int = 200) -> list[Event]:
        """Events with an id above ``after``, oldest first."""
        result = self._get(f"/runs/{quote(run)}/events", after=after, limit=limit)
        return [Event.of(row) for row in result]

    def logs(
        self,
        run: str,
        *,
        replica: int | None = None,
        level: str = "",
        text: str = "",
        after: int | None = None,
        limit: int = 500,
    ) -> list[LogLine]:
        """Log lines, oldest first: those with an id above ``after``, or the newest ``limit``."""
        rows = self._get(
            f"/runs/{quote(run)}/logs",
            replica=replica,
            level=level,
            text=text,
            after=after,
            limit=limit,
        )
        return [LogLine.of(row) for row in rows]

    def points(
        self, run: str, series: str, *, replica: int | None = None, max_points: int = 2000
    ) -> dict[str, Any]:
        """One chart series in columns; see ``docs/api.md``."""
        result: dict[str, Any] = self._get(
            f"/runs/{quote(run)}/points", series=series, replica=replica, max_points=max_points
        )
        return result

    def export(self, run: str, table: str, format: str, *, to: Path) -> int:
        """Write all rows to the file ``to``, atomically. Returns its size in bytes."""
        return _write(self.export_stream(run, table, format), to)

    def export_runs(self, format: str, *, query: str = "", to: Path) -> int:
        """Write one row per run that matches to the file ``to``. Returns its size in bytes."""
        return _write(self.export_runs_stream(format, query=query), to)

    def export_runs_stream(self, format: str, *, query: str = "") -> Iterator[bytes]:
        return self._http.stream(f"/runs/export.{quote(format)}", {"q": query})

    def export_stream(self, run: str, table: str, format: str) -> Iterator[bytes]:
        return self._http.stream(f"/runs/{quote(run)}/export/{quote(table)}.{quote(format)}")

    def findings(self, run: str) -> list[Finding]:
        """Conditions of the run that need attention now, the worst first."""
        return [Finding.of(row) for row in self._get(f"/runs/{quote(run)}/findings")]

    def activity(
        self,
        run: str,
        *,
        source: str = "",
        level: str = "",
        replica: int | None = None,
        text: str = "",
        limit: int = 200,
    ) -> list[Activity]:
        """Events and alerts, newest first. ``source`` is ``event`` or ``alert``; ``level`` is
        ``warning`` (or worse) or ``error``."""
        path = f"/runs/{quote(run)}/activity"
        filters = {"source": source, "level": level, "replica": replica, "text": text}
        return [Activity.of(row) for row in self._get(path, **filters, limit=limit)]

    def log_file(
        self, run: str, format: str, *, replica: int | None = None, level: str = "", text: str = ""
    ) -> Iterator[bytes]:
        """All log lines that match, as ``txt`` or ``jsonl``, in chunks."""
        filters = {"replica": replica, "level": level, "text": text}
        return self._http.stream(f"/runs/{quote(run)}/logs.{quote(format)}", filters)

    def alerts(self, run: str) -> list[Alert]:
        """Open alerts first, then the newest."""
        return [Alert.of(row) for row in self._get(f"/runs/{quote(run)}/alerts")]

    def document(self, run: str, *, fork: bool = False, round: int | None = None) -> dict[str, Any]:
        """The document that creates the same run with :meth:`submit`.

        ``fork``: start from the weights of a checkpoint, by default the newest; ``round`` selects
        another.
        """
        query = {"fork": "true" if fork else None, "round": round}
        result: dict[str, Any] = self._get(f"/runs/{quote(run)}/document", **query)
        return result

    def sweeps(self, *, before: str | None = None, limit: int = 50) -> SweepPage:
        """One page of sweeps, newest first. ``before`` is the ``next`` of the previous page."""
        return SweepPage.of(self._get("/sweeps", before=before, limit=limit))

    def ranked_sweep(self, sweep: str, *, metric: str | None = None) -> RankedSweep:
        """A sweep with its runs, the best first by ``metric`` (default: the sweep's own)."""
        return RankedSweep.of(self._get(f"/sweeps/{quote(sweep)}", metric=metric))

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

    def stop(self, run: str, *, reason: str = "", force: bool = False) -> Done:
        return self._act(run, "stop", reason=reason, force=force)

    def trackers(self) -> list[Tracker]:
        return [Tracker.of(row) for row in self._get("/trackers")]

    def mirrors(self, run: str) -> list[Mirror]:
        return [Mirror.of(row) for row in self._get(f"/runs/{quote(run)}/mirrors")]

    def mirror(self, run: str, tracker: str) -> Done:
        """Mirror the run's metrics to a tracker."""
        return self._act(run, "mirrors", tracker=tracker)

    def stop_mirror(self, run: str, tracker: str) -> Done:
        return self._act(run, "mirrors/stop", tracker=tracker)

    def evaluations(self, run: str) -> list[Evaluation]:
        """The evaluations of the run's checkpoints, newest round first."""
        return [Evaluation.of(row) for row in self._get(f"/runs/{quote(run)}/evaluations")]

    def evaluation_attempts(self, run: str, evaluation: int) -> list[EvaluationAttempt]:
        """The backend jobs of an evaluation, with the end of their logs."""
        path = f"/runs/{quote(run)}/evaluations/{int(evaluation)}/attempts"
        return [EvaluationAttempt.of(row) for row in self._get(path)]

    def evaluation_plans(self, run: str) -> list[EvaluationPlan]:
        path = f"/runs/{quote(run)}/evaluation-plans"
        return [EvaluationPlan.of(row) for row in self._get(path)]

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

    def deletion(self, run: str) -> DeletionPlan:
        """The objects that :meth:`delete` with ``objects`` would delete and keep."""
        return DeletionPlan.of(self._get(f"/runs/{quote(run)}/deletion"))

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


def _write(chunks: Iterator[bytes], to: Path) -> int:
    """Write to a file of another name first, so that ``to`` is complete or unchanged."""
    part = to.with_name(f".{to.name}.{secrets.token_hex(4)}.part")
    size = 0
    try:
        with part.open("wb") as file:
            for chunk in chunks:
                size += file.write(chunk)
        part.replace(to)
    finally:
        part.unlink(missing_ok=True)
    return size
