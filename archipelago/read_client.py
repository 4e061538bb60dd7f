"""Methods of the client that read runs, the fleet, spending and sweeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from archipelago import files
from archipelago.evaluation_rows import Evaluation, EvaluationAttempt, EvaluationPlan
from archipelago.fleet_rows import FleetPage, LiveJob, Spend
from archipelago.frame_client import FrameClient
from archipelago.list_rows import RunGroups
from archipelago.rows import (
    Alert,
    DeletionPlan,
    Event,
    LogLine,
    Me,
    Pool,
    Replica,
    Run,
    RunHeader,
    RunPage,
)
from archipelago.run_page_rows import Activity, Finding
from archipelago.sweep_rows import RankedSweep, SweepPage
from archipelago.tracker_rows import Mirror, Tracker


class ReadClient(FrameClient):
    """Base of :class:`archipelago.client.Client`."""

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
        totals: bool = False,
    ) -> RunPage:
        """One page of runs, newest first.

        ``query`` has the syntax of the search field, e.g. ``state:running loss<3``. Archived runs
        are left out unless it includes them. ``before`` is the ``next`` of the previous page.
        ``totals`` asks for those of all runs that match.
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
            totals="true" if totals else None,
        )
        return RunPage.of({"totals": None, **page})  # an earlier server sends none

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

    def spend_file(
        self,
        format: str,
        *,
        first: str | None = None,
        last: str | None = None,
        days: int | None = None,
        backend: str = "",
        owner: str = "",
    ) -> Iterator[bytes]:
        """The rows of the total and of each day, backend, owner, run and tag, as a file."""
        query = {"from": first, "to": last, "days": days, "backend": backend, "owner": owner}
        return self._http.stream(f"/spend.{quote(format)}", query)

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
        return files.write(self.export_stream(run, table, format), to)

    def export_runs(self, format: str, *, query: str = "", to: Path) -> int:
        """Write one row per run that matches to the file ``to``. Returns its size in bytes."""
        return files.write(self.export_runs_stream(format, query=query), to)

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

    def trackers(self) -> list[Tracker]:
        return [Tracker.of(row) for row in self._get("/trackers")]

    def mirrors(self, run: str) -> list[Mirror]:
        return [Mirror.of(row) for row in self._get(f"/runs/{quote(run)}/mirrors")]

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

    def deletion(self, run: str) -> DeletionPlan:
        """The objects that :meth:`delete` with ``objects`` would delete and keep."""
        return DeletionPlan.of(self._get(f"/runs/{quote(run)}/deletion"))
