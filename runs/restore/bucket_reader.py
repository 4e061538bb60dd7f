"""Reads everything but the journal from a bucket, with the functions of live ingest, to its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from django.utils import timezone

from diloco.protocol import keys
from diloco.protocol.group_document import GroupDocument, ProtocolMismatch
from diloco.protocol.records import BadRecord, FinalManifest
from diloco.protocol.settings import SettingsError
from diloco.store.base import MissingKey, Store
from runs.exceptions import ActionRefused
from runs.ingest.checkpoints import read_final
from runs.ingest.leases import Leases
from runs.ingest.rounds import ingest_rounds
from runs.ingest.telemetry import ingest_telemetry
from runs.ingest.telemetry_gaps import find_gap
from runs.metrics.changes import Changes
from runs.models import Replica, Run, TelemetryCursor
from runs.restore.journal_reader import missing
from runs.restore.round_import import import_closed_rounds


def document(store: Store) -> GroupDocument:
    try:
        return GroupDocument.read(store)
    except MissingKey:
        raise ActionRefused(f"expected {keys.GROUP} under {store.uri}, found none") from None
    except (SettingsError, ProtocolMismatch) as error:
        raise ActionRefused(str(error)) from error


def final(run: Run, store: Store, remarks: list[str]) -> FinalManifest | None:
    try:
        return read_final(run, store)
    except BadRecord as error:
        remarks.append(f"not read: {keys.FINAL_MANIFEST}: {error}")
        return None


def read_rounds(
    run: Run, store: Store, now: datetime, changes: Changes, *, resumed: Sequence[datetime]
) -> None:
    """Read all rounds: the closed ones together, then the open one, and those that were closed in
    the meantime. Raises :class:`ActionRefused` if a commit is missing before a later one."""
    import_closed_rounds(run, store, now, resumed=resumed)
    before = -1
    while run.next_round != before:
        before = run.next_round
        ingest_rounds(run, store, now=now, changes=changes, resumed=resumed)
        run.refresh_from_db()
    committed = (keys.parse_commit(key) or 0 for key in _names(store, keys.ROUNDS))
    last = max(committed, default=0)
    if last >= run.next_round:
        raise ActionRefused(
            f"expected {keys.commit(run.next_round)}, found none, while round {last} is committed"
        )


def read_telemetry(
    run: Run, store: Store, leases: Leases, changes: Changes, *, busy: frozenset[int]
) -> list[str]:
    """Read telemetry process by process, in order: a later process overrides an earlier one's
    steps.

    ``busy`` are replicas that can still write. Returns the missing segments.
    """
    remarks: list[str] = []
    by_replica: dict[int, list[str]] = defaultdict(list)
    for number, incarnation in sorted(leases.incarnations):
        by_replica[number].append(incarnation)
    for depth in range(max(map(len, by_replica.values()), default=0)):
        current = {n: names[depth] for n, names in by_replica.items() if depth < len(names)}
        for number, name in current.items():
            Replica.objects.filter(run=run, number=number).update(incarnation=name)
        ended_numbers = {n for n in current if depth + 1 < len(by_replica[n]) or n not in busy}
        _read_all(run, store, current, ended=frozenset(ended_numbers), changes=changes)
        while gaps := _skip_gaps(run, store, current):
            remarks += gaps
            _read_all(run, store, current, ended=frozenset(ended_numbers), changes=changes)
    return remarks


def _names(store: Store, prefix: str) -> Iterator[str]:
    """Object keys page by page: a long run has more objects than one listing can return."""
    return (info.key for page in store.list_pages(prefix) for info in page)


def _skip_gaps(run: Run, store: Store, names: Mapping[int, str]) -> list[str]:
    """Move the cursors of these processes past missing segments; return those segments."""
    gaps = []
    cursors = TelemetryCursor.objects.filter(replica__run=run).select_related("replica")
    for cursor in cursors:
        if names.get(cursor.replica.number) != cursor.incarnation:
            continue
        if (gap := find_gap(store, cursor)) and gap.skip():
            gaps.append(missing(*gap.ends))
    return gaps


def _read_all(
    run: Run, store: Store, names: Mapping[int, str], *, ended: frozenset[int], changes: Changes
) -> None:
    """Read everything that these processes wrote. A pass that moves no cursor can still end one,
    and the next pass then reads the next process of that replica."""
    before: list[tuple[Any, ...]] = []
    while True:
        ingest_telemetry(
            run,
            store,
            list(run.replicas.select_related("pool")),
            names.items(),
            ended=ended,
            now=timezone.now(),
            changes=changes,
            skips_gaps=False,  # each is a remark of the import
        )
        run.refresh_from_db()
        # Points are not published, because no page shows this run yet.
        changes.points.clear()
        cursors = TelemetryCursor.objects.filter(replica__run=run).order_by("pk")
        state = list(cursors.values_list("pk", "next_n", "ended"))
        if state == before:
            return
        before = state


def next_command(store: Store) -> int:
    numbered = (
        key.removeprefix(keys.CONTROL).removesuffix(".json")
        for key in _names(store, keys.CONTROL)
        if not key.startswith(keys.JOURNAL)
    )
    return max((int(n) for n in numbered if n.isdecimal()), default=0) + 1
