"""What an import reads of a bucket beside the journal, with the functions that read it while the
run is live, but to its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from django.utils import timezone

from diloco.rendezvous import keys
from diloco.rendezvous.document import GroupDocument, ProtocolMismatch
from diloco.rendezvous.records import BadRecord, FinalManifest
from diloco.rendezvous.settings import SettingsError
from diloco.rendezvous.store import MissingKey, Store
from runs.bucket.beats import Leases
from runs.bucket.history import ingest_rounds
from runs.bucket.ingest import ingest_telemetry
from runs.bucket.reading import Changes
from runs.bucket.results import read_final
from runs.exceptions import CannotDo
from runs.models import Replica, Run, TelemetryCursor


def document(store: Store) -> GroupDocument:
    try:
        return GroupDocument.from_bytes(store.get(keys.GROUP))
    except MissingKey:
        raise CannotDo(f"expected {keys.GROUP} under {store.uri}, found none") from None
    except (SettingsError, ProtocolMismatch) as error:
        raise CannotDo(str(error)) from error


def final(store: Store, remarks: list[str]) -> FinalManifest | None:
    try:
        return read_final(store)
    except BadRecord as error:
        remarks.append(f"not read: {keys.FINAL_MANIFEST}: {error}")
        return None


def read_rounds(
    run: Run, store: Store, now: datetime, changes: Changes, *, resumed: Sequence[datetime]
) -> None:
    before = -1
    while run.next_round != before:
        before = run.next_round
        ingest_rounds(run, store, now=now, changes=changes, resumed=resumed)
        run.refresh_from_db()


def read_telemetry(
    run: Run, store: Store, leases: Leases, changes: Changes, *, busy: frozenset[int]
) -> None:
    """Process by process, as it came: what a later one says of a step replaces the earlier's.
    ``busy`` are replicas that may still write."""
    by_replica: dict[int, list[str]] = defaultdict(list)
    for number, incarnation in sorted(leases.incarnations):
        by_replica[number].append(incarnation)
    for depth in range(max(map(len, by_replica.values()), default=0)):
        now_on = {n: names[depth] for n, names in by_replica.items() if depth < len(names)}
        for number, name in now_on.items():
            Replica.objects.filter(run=run, number=number).update(incarnation=name)
        over = {n for n in now_on if depth + 1 < len(by_replica[n]) or n not in busy}
        _drain(run, store, now_on, over=frozenset(over), changes=changes)


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
        info.key.removeprefix(keys.CONTROL).removesuffix(".json")
        for info in store.list(keys.CONTROL)
        if not info.key.startswith(keys.JOURNAL)
    )
    return max((int(n) for n in numbered if n.isdecimal()), default=0) + 1
