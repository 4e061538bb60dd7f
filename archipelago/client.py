"""The API as methods. Blocking; one object may be used by many threads."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from archipelago.errors import NotFound
from archipelago.login import check_url, read_login
from archipelago.rows import (
    Alert,
    DeletionPlan,
    Done,
    Event,
    LogLine,
    Me,
    Page,
    Pool,
    Replica,
    Run,
    Scaled,
)
from archipelago.transport import Http

POLL_S = 2.0
SHORTEST = 4
"""Characters of an id that may stand for it."""


class Client:
    """``client.submit(document)``, ``client.watch(run.id)`` and so on. Every method raises
    :class:`~archipelago.errors.ApiError` when the server cannot be asked or says no."""

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
        """As ``archipelago login`` has left it, or as the environment has it."""
        login = read_login()
        return cls(login.url, login.token, **options)

    # Looking.

    def me(self) -> Me:
        return Me.of(self._get("/me"))

    def backends(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("/backends")
        return found

    def settings(self) -> list[dict[str, Any]]:
        """The schema of the group settings."""
        found: list[dict[str, Any]] = self._get("/settings")
        return found

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
    ) -> Page:
        """One page, newest first. ``query`` is as in the list's own box: ``state:running loss<3``;
        archived runs are left out unless it asks for them."""
        found = self._get(
            "/runs",
            state=list(states), owner=owner, backend=backend, name=name, q=query, before=before,
            limit=limit,
        )  # fmt: skip
        return Page(runs=tuple(Run.of(row) for row in found["runs"]), next=found["next"])

    def every_run(self, **filters: Any) -> Iterator[Run]:
        """Page by page, as far as somebody reads."""
        before: str | None = None
        while True:
            page = self.runs(before=before, limit=200, **filters)
            yield from page.runs
            if page.next is None:
                return
            before = page.next

    def run(self, run: str) -> Run:
        """With ``settings``, ``workload`` and ``pools`` in ``raw``."""
        return Run.of(self._get(f"/runs/{quote(run)}"))

    def info(self, run: str) -> dict[str, Any]:
        """What a client of the group has to know: see ``docs/api.md``."""
        found: dict[str, Any] = self._get(f"/runs/{quote(run)}/info")
        return found

    def pools(self, run: str) -> list[Pool]:
        return [Pool.of(row) for row in self.run(run).raw["pools"]]

    def replicas(self, run: str) -> list[Replica]:
        return [Replica.of(row) for row in self._get(f"/runs/{quote(run)}/replicas")]

    def events(self, run: str, *, after: int = 0, limit: int = 200) -> list[Event]:
        """Oldest first, those after the id ``after``."""
        found = self._get(f"/runs/{quote(run)}/events", after=after, limit=limit)
        return [Event.of(row) for row in found]

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
        """Oldest first: those after the id ``after``, or the newest."""
        found = self._get(
            f"/runs/{quote(run)}/logs",
            replica=replica, level=level, text=text, after=after, limit=limit,
        )  # fmt: skip
        return [LogLine.of(row) for row in found]

    def points(
        self, run: str, series: str, *, replica: int | None = None, max_points: int = 2000
    ) -> dict[str, Any]:
        """One curve in columns; see ``docs/api.md``."""
        found: dict[str, Any] = self._get(
            f"/runs/{quote(run)}/points", series=series, replica=replica, max_points=max_points
        )
        return found

    def export(self, run: str, table: str, format: str, *, to: Path) -> int:
        """Every row into the file ``to``, which appears when it is whole; its size in bytes."""
        part = to.with_name(f".{to.name}.{secrets.token_hex(4)}.part")
        size = 0
        try:
            with part.open("wb") as file:
                for chunk in self.export_stream(run, table, format):
                    size += file.write(chunk)
            part.replace(to)
        finally:
            part.unlink(missing_ok=True)
        return size

    def export_stream(self, run: str, table: str, format: str) -> Iterator[bytes]:
        return self._http.stream(f"/runs/{quote(run)}/export/{quote(table)}.{quote(format)}")

    def alerts(self, run: str) -> list[Alert]:
        """Open ones first, then newest first."""
        return [Alert.of(row) for row in self._get(f"/runs/{quote(run)}/alerts")]

    def document(self, run: str, *, fork: bool = False, round: int | None = None) -> dict[str, Any]:
        """What :meth:`submit` makes another such run of. ``fork``: with the weights of a
        checkpoint, the newest unless ``round`` names another."""
        query = {"fork": "true" if fork else None, "round": round}
        found: dict[str, Any] = self._get(f"/runs/{quote(run)}/document", **query)
        return found

    # Acting.

    def submit(self, document: Mapping[str, Any], *, key: str | None = None) -> Run:
        """Make a run of the document and launch it. ``key``: sent again with it, it is the same
        run; one is made up, so that a lost answer makes no second run."""
        _, found = self._http.call(
            "POST",
            "/runs",
            body=dict(document),
            headers={"Idempotency-Key": key or secrets.token_urlsafe(24)},
            again=True,
        )
        return Run.of(found)

    def plan(self, document: Mapping[str, Any], *, ask: bool = True) -> dict[str, Any]:
        """``estimate`` and ``problems`` of a document; nothing is started. ``ask`` False leaves
        out what backends and bucket would say."""
        query = {"ask": "true" if ask else "false"}
        _, found = self._http.call("POST", "/plan", body=dict(document), query=query, again=True)
        plan: dict[str, Any] = found
        return plan

    def upload(self, data: bytes) -> str:
        """A zip of Python files; its sha256, for ``archive`` of a workload."""
        _, found = self._http.call(
            "POST", "/archives", data=data, headers={"Content-Type": "application/zip"}, again=True
        )
        return str(found["sha256"])

    def stop(self, run: str, *, reason: str = "", force: bool = False) -> Done:
        body = {"reason": reason, "force": force}
        return Done.of(self._post(f"/runs/{quote(run)}/stop", body))

    def pause(self, run: str) -> Done:
        return Done.of(self._post(f"/runs/{quote(run)}/pause", {}))

    def resume(self, run: str) -> Done:
        return Done.of(self._post(f"/runs/{quote(run)}/resume", {}))

    def save(self, run: str) -> Done:
        return Done.of(self._post(f"/runs/{quote(run)}/save", {}))

    def describe(
        self,
        run: str,
        *,
        notes: str | None = None,
        tags: Sequence[str] | None = None,
        archived: bool | None = None,
    ) -> Done:
        """What is None stays as it is."""
        wanted = {
            "notes": notes, "tags": None if tags is None else list(tags), "archived": archived
        }  # fmt: skip
        body = {name: value for name, value in wanted.items() if value is not None}
        return Done.of(self._post(f"/runs/{quote(run)}/describe", body))

    def delete(self, run: str, *, name: str, objects: bool = False) -> Done:
        """``name`` is the run's, as a precaution; ``objects``: what is in its bucket as well."""
        return Done.of(self._post(f"/runs/{quote(run)}/delete", {"name": name, "objects": objects}))

    def deletion(self, run: str) -> DeletionPlan:
        """What :meth:`delete` with ``objects`` would delete, and what it would keep."""
        return DeletionPlan.of(self._get(f"/runs/{quote(run)}/deletion"))

    def stop_replica(self, run: str, number: int, *, force: bool = False) -> Done:
        return Done.of(
            self._post(f"/runs/{quote(run)}/replicas/{int(number)}/stop", {"force": force})
        )

    def restart_replica(self, run: str, number: int, *, force: bool = False) -> Done:
        return Done.of(
            self._post(f"/runs/{quote(run)}/replicas/{int(number)}/restart", {"force": force})
        )

    def scale(self, run: str, pool: int, count: int) -> Scaled:
        return Scaled.of(
            self._post(f"/runs/{quote(run)}/pools/{int(pool)}/scale", {"count": count})
        )

    def add_pool(self, run: str, pool: Mapping[str, Any]) -> Pool:
        return Pool.of(self._post(f"/runs/{quote(run)}/pools", dict(pool)))

    # Waiting.

    def watch(self, run: str, *, poll_s: float = POLL_S) -> Iterator[Run]:
        """The run as it is, again and again until it is over."""
        while True:
            found = self.run(run)
            yield found
            if found.ended:
                return
            self.sleep(poll_s)

    def find(self, wanted: str) -> Run:
        """A run by its id, the beginning of one, its name (the newest so called), or ``last``.

        Raises :class:`NotFound`, also where a beginning fits several.
        """
        if wanted == "last":
            newest = self.runs(limit=1).runs
            if not newest:
                raise NotFound("there is no run yet")
            return newest[0]
        if len(wanted) == 36 and wanted.count("-") == 4:
            return self.run(wanted)
        named = [run for run in self.runs(name=wanted[:80], limit=200).runs if run.name == wanted]
        if named:
            return named[0]
        if len(wanted) < SHORTEST:
            raise NotFound(f"expected {SHORTEST} characters of an id, or a name, found {wanted!r}")
        found = [run for run in self.every_run() if run.id.startswith(wanted.lower())]
        if len(found) == 1:
            return found[0]
        if not found:
            raise NotFound(f"expected a run's id, its beginning or its name, found {wanted!r}")
        raise NotFound(f"expected one run, found {len(found)} whose id begins with {wanted!r}")

    def _get(self, path: str, **query: Any) -> Any:
        return self._http.call("GET", path, query=query)[1]

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._http.call("POST", path, body=body)[1]
