"""What an import reads of a bucket beside the journal, with the functions that read it while the
run is live, but to its end."""

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
from runs.exceptions import CannotDo
from runs.ingest.checkpoints import read_final
from runs.ingest.leases import Leases
from runs.ingest.rounds import ingest_rounds
from runs.ingest.telemetry import ingest_telemetry
from runs.metrics.changes import Changes
from runs.models import Replica, Run, TelemetryCursor
from runs.restore.journal_reader import missing


def document(store: Store) -> GroupDocument:
    try:
        return GroupDocument.read(store)
    except MissingKey:
        raise CannotDo(f"expected {keys.GROUP} under {store.uri}, found none") from None
    except (SettingsError, ProtocolMismatch) as error:
        raise CannotDo(str(error)) from error


def final(run: Run, store: Store, remarks: list[str]) -> FinalManifest | None:
    try:
        return read_final(run, store)
    except BadRecord as error:
        remarks.append(f"not read: {keys.FINAL_MANIFEST}: {error}")
        return None


def read_rounds(
    run: Run, store: Store, now: datetime, changes: Changes, *, resumed: Sequence[datetime]
) -> None:
    """Raises :class:`CannotDo` where a commit is missing and a later one is there."""
    before = -1
    while run.next_round != before:
        before = run.next_round
        ingest_rounds(run, store, now=now, changes=changes, resumed=resumed)
        run.refresh_from_db()
    committed = (keys.parse_commit(key) or 0 for key in _names(store, keys.ROUNDS))
    last = max(committed, default=0)
    if last >= run.next_round:
        raise CannotDo(
            f"expected {keys.commit(run.next_round)}, found none, while round {last} is committed"
        )


def read_telemetry(
    run: Run, store: Store, leases: Leases, changes: Changes, *, busy: frozenset[int]
) -> list[str]:
    """Process by process, as it came: what a later one says of a step replaces the earlier's.
    ``busy`` are replicas that may still write. Returns the segments that are missing."""
    remarks: list[str] = []
    by_replica: dict[int, list[str]] = defaultdict(list)
    for number, incarnation in sorted(leases.incarnations):
        by_replica[number].append(incarnation)
    for depth in range(max(map(len, by_replica.values()), default=0)):
        now_on = {n: names[depth] for n, names in by_replica.items() if depth < len(names)}
        for number, name in now_on.items():
            Replica.objects.filter(run=run, number=number).update(incarnation=name)
        over = {n for n in now_on if depth + 1 < len(by_replica[n]) or n not in busy}
        _drain(run, store, now_on, over=frozenset(over), changes=changes)
        while gaps := _pass_gaps(run, store, now_on):
            remarks += gaps
            _drain(run, store, now_on, over=frozenset(over), changes=changes)
    return remarks


def _names(store: Store, prefix: str) -> Iterator[str]:
    """Page by page: a long run has more objects than one listing may have."""
    return (info.key for page in store.list_pages(prefix) for info in page)


def _pass_gaps(run: Run, store: Store, names: Mapping[int, str]) -> list[str]:
    """Move the cursors of these processes past segments that are missing; which ones."""
    found = []
    cursors = TelemetryCursor.objects.filter(replica__run=run).select_related("replica")
    for cursor in cursors:
        number, name = cursor.replica.number, cursor.incarnation
        if names.get(number) != name:
            continue
        listed = _names(store, keys.telemetry_dir(number, name))
        later = [parsed[2] for key in listed if (parsed := keys.parse_telemetry(key))]
        following = min((n for n in later if n > cursor.next_n), default=0)
        if not following or cursor.next_n in later:
            continue
        first, last = cursor.next_n, following - 1
        found.append(
            missing(keys.telemetry(number, name, first), keys.telemetry(number, name, last))
        )
        TelemetryCursor.objects.filter(pk=cursor.pk).update(next_n=following, ended=False)
    return found


def _drain(
    run: Run, store: Store, names: Mapping[int, str], *, over: frozenset[int], changes: Changes
) -> None:
    """All that these processes wrote."""
    before: list[tuple[Any, ...]] = []
    while True:
        ingest_telemetry(
            run,
            store,
            list(run.replicas.select_related("pool", "run")),
            names.items(),
            ended=over,
            now=timezone.now(),
            changes=changes,
        )
        run.refresh_from_db()
        # Points are not published: nobody watches yet.
        changes.points.clear()
        cursors = TelemetryCursor.objects.filter(replica__run=run).order_by("pk")
        found = list(cursors.values_list("pk", "next_n", "ended"))
        if found == before:
            return
        before = found


def next_command(store: Store) -> int:
    numbered = (
        key.removeprefix(keys.CONTROL).removesuffix(".json")
        for key in _names(store, keys.CONTROL)
        if not key.startswith(keys.JOURNAL)
    )
    return max((int(n) for n in numbered if n.isdecimal()), default=0) + 1
