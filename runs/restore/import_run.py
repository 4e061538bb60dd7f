"""Imports a run from its bucket alone, when the database was lost or is another one.

``group.json`` defines the run and the journal has the control plane's records
(:mod:`runs.ingest.journal`). Everything else is read by the functions of live ingest. A group that
was created without a control plane has no journal; its run gets one pool with every replica that
wrote a lease, and counts as ended.

The run is first stored as *cancelled*, so that no tick processes it. Its state, attempts and events
are written at the end in one transaction. From then on the reconciler continues the run: if the
journal has open jobs, they are polled, commanded and billed again. No other control plane can
manage the same run at that time.

A bucket does not contain, and an import does not restore: users, the user who added a pool (it then
has the owner's permissions), tokens, credentials (matched by name), archives (kept as the bucket's
``code/``), and times of observation (:data:`runs.restore.import_run.OWN_CLOCK`).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeVar

from django.contrib.auth.models import User
from django.db import DatabaseError, models, transaction
from django.utils import timezone

from diloco.protocol import keys, ownership
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.parsing import abridged
from diloco.store.base import MissingKey, ObjectTooLarge, Store
from diloco.store.location import canonical
from executors.base import PendingCause
from runs.exceptions import ActionRefused, InvalidRun
from runs.ingest import journal, journal_tables
from runs.ingest.checkpoints import import_checkpoints, store_final
from runs.ingest.leases import Leases, read_leases, store_leases
from runs.ingest.stores import store_for
from runs.metrics import healing
from runs.metrics.changes import Changes
from runs.models import (
    Archive,
    Credential,
    Event,
    Journal,
    Replica,
    ReplicaPool,
    Run,
    Webhook,
)
from runs.reconcile.billing import attempts_usd
from runs.restore.bucket_reader import (
    document,
    final,
    next_command,
    read_rounds,
    read_telemetry,
)
from runs.restore.columns import columns, moment
from runs.restore.evaluation_import import read_evaluations, store_evaluations, written_names
from runs.restore.journal_reader import JournalState, read_journal
from runs.restore.journal_rows import store_alerts, store_attempts, store_events
from runs.states import RUN_ENDED, ReplicaState, RunState
from runs.submit.create import rendezvous_uri
from runs.submit.prefixes import check_free, lock
from runs.submit.uploads import ARCHIVE_BYTES, store_archive
from runs.transitions import record_event

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=models.Model)

IMPORTING = "being imported"
ABANDONED_AFTER = timedelta(days=1)
"""An older import must have been killed before it could remove its rows."""
OWN_CLOCK: Mapping[str, frozenset[str]] = {
    "Run": frozenset({"last_seen_at", "committed_at"}),
    "Replica": frozenset({"beat_at", "beat_observed_s", "beat_judged"}),
    "TelemetryCursor": frozenset({"moved_at"}),
    "Evaluation": frozenset({"next_at"}),
}
"""Columns with a time of observation or of a next step. An import sets them to now."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """An imported run. ``remarks`` list what could not be imported."""

    run: Run
    remarks: tuple[str, ...]


def import_run(uri: str, *, owner: User | None = None, credential: str = "") -> Imported:
    """Import the run whose rendezvous is ``uri``.

    ``owner`` defaults to the user that the journal names. ``credential`` is the name of the
    credential for the bucket. Raises :class:`ActionRefused`, or
    :class:`~diloco.store.base.StoreError` if the bucket is unreadable.
    """
    return _Import(uri, owner, credential).run()


def remove_abandoned(now: datetime) -> int:
    """Remove the rows of imports that were killed; return the number of runs."""
    abandoned = Run.objects.filter(
        state=RunState.CANCELLED, state_reason=IMPORTING, state_since__lt=now - ABANDONED_AFTER
    )
    removed = 0
    for run in abandoned:
        logger.warning("import of %s did not finish; its rows are removed", run)
        run.delete()
        removed += 1
    return removed


@dataclass
class _Import:
    uri: str
    owner: User | None
    credential: str
    remarks: list[str] = field(default_factory=list)
    stub: uuid.UUID | None = None

    def run(self) -> Imported:
        """Import; on any error remove all rows of the run."""
        try:
            return self._run()
        except (ActionRefused, InvalidRun):
            self._clean_up()
            raise
        except BaseException as error:
            self._clean_up()
            if isinstance(
                error, ValueError | TypeError | LookupError | OverflowError | DatabaseError
            ):
                logger.warning("import of %s", self.uri, exc_info=error)
                raise ActionRefused(
                    f"expected the records of a run under {self.uri}, found some that cannot be "
                    f"stored: {type(error).__name__}: {abridged(str(error))}"
                ) from error
            raise

    def _clean_up(self) -> None:
        if self.stub is not None:
            Run.objects.filter(pk=self.stub, state_reason=IMPORTING).delete()

    def _run(self) -> Imported:
        opener = self._opener()
        draft = Run(rendezvous=rendezvous_uri(self.uri, uuid.uuid4()), store_credential=opener)
        store = store_for(draft)
        group = document(store)
        _check_owner(store, group)
        journal_state = read_journal(store)
        self._losses(journal_state)
        leases = read_leases(store)
        run = self._stub(group, draft, journal_state)
        self.stub = run.pk
        self._create_replicas(run, journal_state, leases)
        changes, now = Changes(), timezone.now()
        read_rounds(run, store, now, changes, resumed=_resumed(journal_state))
        open_attempts = (a for a in journal_state.attempts.values() if a.get("ended_at") is None)
        busy = frozenset(attempt.get("replica", -1) for attempt in open_attempts)
        self.remarks += read_telemetry(run, store, leases, changes, busy=busy)
        import_checkpoints(run, store, now=now)
        result = final(run, store, self.remarks)
        if result is not None:
            store_final(run, store, result, now=now)
        store_leases(run, list(run.replicas.all()), leases, now=now)
        evaluations = read_evaluations(run, store, journal_state, self.remarks, self._credential)
        with transaction.atomic():
            store_attempts(run, journal_state, self.remarks)
            store_evaluations(run, evaluations, journal_state, self.remarks)
            store_alerts(run, journal_state)
            store_events(run, journal_state, self.remarks)
            # Only now, because events show which replicas were catching up.
            healing.mark(run, run.rounds.order_by("number").defer("timings"))
            self._remark(run)
            self._states(run, journal_state, store, reason=result.reason if result else "")
        run.refresh_from_db()
        return Imported(run=run, remarks=tuple(self.remarks))

    def _losses(self, journal_state: JournalState) -> None:
        """Record losses. An incomplete journal is enough for an ended run: its last state is known
        and losses are reported. For an active run, a lost object can name a running job."""
        self.remarks += [f"not read: {refused}" for refused in journal_state.refused]
        if journal_state.refused and journal_state.run.get("state") not in RUN_ENDED:
            raise ActionRefused(
                "expected the complete journal of a run that has not ended, because only the "
                f"journal lists its jobs: {'; '.join(journal_state.refused[:5])}"
            )

    def _remark(self, run: Run) -> None:
        """Record what could not be imported as an event of the run."""
        if self.remarks:
            record_event(
                run,
                "import",
                f"imported with losses: {'; '.join(self.remarks)}",
                level=Event.Level.WARNING,
            )

    def _opener(self) -> Credential | None:
        if not self.credential:
            return None
        credential_row = Credential.objects.filter(name=self.credential, kind="store").first()
        if credential_row is None:
            raise ActionRefused(
                f"expected a credential of kind store, found none {self.credential!r}"
            )
        return credential_row

    @transaction.atomic
    def _stub(self, document: GroupDocument, draft: Run, journal_state: JournalState) -> Run:
        """Create the run's row, which other rows refer to; no tick processes it yet."""
        lock()  # serialises a submission and an import of the same prefix
        pk = run_id(document, draft.rendezvous)
        known = (
            Run.objects.filter(pk=pk).first()
            or Run.objects.filter(rendezvous=draft.rendezvous).first()
        )
        if known is not None and known.state_reason == IMPORTING:
            known.delete()  # left by an import that did not finish
        elif known is not None:
            raise ActionRefused(f"expected a run that is not here yet, found {known.name!r} ({pk})")
        check_free(canonical(draft.rendezvous, resolve=False), viewer=self.owner, but=pk)
        name = journal_state.run.get("owner", "")
        owner = self.owner or User.objects.filter(username=name).first()
        if owner is None:
            problem = (
                f"the journal names {name!r}, who is not a user here"
                if name
                else "the bucket names none"
            )
            raise ActionRefused(f"expected an owner: {problem}; name one")
        now = timezone.now()
        if self.credential == "" and journal_state.run.get("store_credential"):
            name = journal_state.run["store_credential"]
            draft.store_credential = self._credential(name, "store")
        return Run.objects.create(
            id=pk,
            name=document.name[:80],
            owner=owner,
            state=RunState.CANCELLED,
            state_reason=IMPORTING,
            state_since=now,
            rendezvous=draft.rendezvous,
            store_credential=draft.store_credential,
            group_settings=document.settings.to_dict(),
            workload=dict(document.workload),
            group_fingerprint=document.fingerprint,
            code_sha256=document.code,
            submit_key=f"import-{pk.hex}",
            created_at=moment(journal_state.run.get("created_at")) or now,
            first_step_at=moment(journal_state.run.get("first_step_at")),
        )

    def _credential(self, name: Any, kind: str) -> Credential | None:
        credential_row = Credential.objects.filter(name=str(name), kind=kind).first()
        if credential_row is None:
            self.remarks.append(f"there is no credential {name!r} for {kind}; none is used")
        return credential_row

    def _create_replicas(self, run: Run, journal_state: JournalState, leases: Leases) -> None:
        """Create pools and replicas: those of the journal, and any others with a lease."""
        now = timezone.now()
        pools: dict[int, ReplicaPool] = {}
        for position, body in sorted(journal_state.pools.items()):
            pool = ReplicaPool(run=run, **columns(ReplicaPool, body, journal_tables.POOL.columns))
            if body.get("credential"):
                pool.credential = self._credential(body["credential"], pool.backend)
            self._set_adder(pool, body.get("added_by"))
            pools[position] = _stored(pool)
        seen_numbers = {number for number, _ in leases.incarnations}
        unknown = len(seen_numbers - set(journal_state.replicas))
        for number in sorted(seen_numbers | set(journal_state.replicas)):
            body = journal_state.replicas.get(number, {})
            position = body.get("pool", -1)
            if position not in pools:
                pools[position] = _stored(
                    ReplicaPool(run=run, backend="external", hardware="unknown", count=unknown)
                )
            pool = pools[position]
            _stored(
                Replica(
                    run=run, pool=pool, number=number, state=ReplicaState.EVICTED, state_since=now
                )
            )

    def _set_adder(self, pool: ReplicaPool, name: str | None) -> None:
        """Set who added the pool. The journal cannot grant permissions, because any process of the
        run can write it: a pool added by another user runs with the owner's permissions."""
        owner = pool.run.owner
        if name == owner.get_username():
            pool.added_by = owner
        elif name is not None:
            self.remarks.append(
                f"pool {pool} was added by {name!r}; it runs with the permissions of the run's "
                f"owner {owner.get_username()!r}"
            )

    def _notify(self, names: list[str] | None) -> list[int] | None:
        if names is None:
            return None
        ids_by_name = dict(Webhook.objects.filter(name__in=names).values_list("name", "pk"))
        if missing := sorted(set(map(str, names)) - set(ids_by_name)):
            self.remarks.append(f"there is no webhook {', '.join(missing)}; it is not notified")
        return sorted(ids_by_name.values())

    def _states(self, run: Run, journal_state: JournalState, store: Store, *, reason: str) -> None:
        for number, body in journal_state.replicas.items():
            names = journal_tables.REPLICA.columns
            fields = columns(Replica, body, names)
            if fields.get("pending_cause", "") not in ("", *PendingCause):
                raise ActionRefused(
                    f"journal: Replica pending_cause: expected one of {', '.join(PendingCause)}, "
                    f"found {abridged(fields['pending_cause'])}"
                )
            if "state" not in fields:  # it was working: its next heartbeat has its state
                fields |= {"state": ReplicaState.SYNCING, "state_reason": "imported"}
            Replica.objects.filter(run=run, number=number).update(**fields)
        archive, notify = journal_state.run.get("archive"), journal_state.run.get("notify")
        fields = columns(Run, journal_state.run, journal_tables.RUN.columns)
        if not journal_state.run:
            fields = _state_without_journal(reason)
        fields["notify"] = self._notify(notify if isinstance(notify, list) else None)
        if archive and Archive.objects.filter(pk=archive).exists():
            fields["archive_id"] = archive
        elif archive:
            fields["archive_id"] = self._archive(store, str(archive))
        fields.setdefault("cost_usd", attempts_usd(run))
        fields["next_command"] = next_command(store)
        run.refresh_from_db(fields=["committed_rounds"])
        fields["watched_round"] = run.committed_rounds  # the journal has the alerts up to here
        Run.objects.filter(pk=run.pk).update(**fields)
        events = list(run.events.order_by("pk").values_list("pk", flat=True))
        Journal.objects.create(
            run=run,
            next_n=journal_state.next_n,
            event_id=max(events, default=0),
            seen={"events": events[-journal.WINDOW :], **written_names(run)},
        )

    def _archive(self, store: Store, sha256: str) -> str | None:
        try:
            data = store.get(keys.code_bundle(sha256), limit=ARCHIVE_BYTES)
            archive = store_archive(data)
        except (MissingKey, ObjectTooLarge, InvalidRun, ValueError) as error:
            self.remarks.append(f"the archive of user code is not imported: {error}")
            return None
        return archive.pk if archive and archive.pk == sha256 else None


def _check_owner(store: Store, group: GroupDocument) -> None:
    """Raise :class:`ActionRefused` if the prefix's marker and ``group.json`` name different runs:
    one of them was replaced. A group created without a control plane has no marker."""
    try:
        owner = ownership.owner_of(store)
    except ownership.PrefixTaken as error:
        raise ActionRefused(str(error)) from None
    if owner is not None and owner != group.run_id:
        raise ActionRefused(
            f"{store.uri}: expected {keys.OWNER} and {keys.GROUP} of one run, found run "
            f"{abridged(owner)} in the first and run {abridged(group.run_id)} in the second"
        )


def run_id(document: GroupDocument, uri: str) -> uuid.UUID:
    """The run's id, or one derived from its location if the id is not a UUID."""
    try:
        return uuid.UUID(document.run_id)
    except ValueError:
        return uuid.uuid5(uuid.NAMESPACE_URL, f"{uri}#{document.run_id}")


def _state_without_journal(reason: str) -> dict[str, Any]:
    now = timezone.now()
    ended = {"started_at": None, "ended_at": now, "state_since": now}
    if reason and reason != "stopped":
        return {**ended, "state": RunState.SUCCEEDED, "state_reason": "imported; it was completed"}
    reason = "imported; no control plane managed it"
    return {**ended, "state": RunState.CANCELLED, "state_reason": reason}


def _resumed(journal_state: JournalState) -> list[datetime]:
    """The times at which the run was resumed."""
    requeued = [e for e in journal_state.events if e.get("to_state") == RunState.QUEUED]
    resumptions = (e for e in requeued if e.get("from_state"))
    times = [moment(e.get("at")) for e in resumptions if e["from_state"] != RunState.DRAFT]
    return [at for at in times if at is not None]


def _stored(row: M) -> M:
    row.save(force_insert=True)
    return row
