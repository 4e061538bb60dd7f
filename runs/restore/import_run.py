"""A run out of its bucket alone: what to do when the database is lost, or is another one.

``group.json`` says what the run is, the journal what only a control plane knew
(:mod:`runs.ingest.journal`), and everything else is read by the same functions that read it while
the run is live. A group that was made without a control plane has no journal; then the run is shown
with one pool of whoever beat, and is over.

The run is stored first as *cancelled*, so that nothing looks after it, and gets its state with its
attempts and events at the end, in one transaction. From then on the reconciler goes on with it as
if nothing had been: a run whose journal says that jobs are open is polled, commanded and paid for
again. So there must not be another control plane that looks after the same run.

What is not in a bucket, and so is not rebuilt: users, who added a pool (it has the permissions of
the owner then), tokens, credentials (they are found by name, if there are any of that name),
archives (kept as the bucket's ``code/``), and when this control plane first saw something
(:data:`runs.restore.import_run.OWN_CLOCK`).
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
from django.db.models import Sum
from django.utils import timezone

from diloco.protocol import keys, ownership
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.parsing import abridged
from diloco.store.base import MissingKey, ObjectTooLarge, Store
from diloco.store.location import canonical
from executors.base import PendingCause
from runs.exceptions import CannotDo, InvalidRun
from runs.ingest import journal
from runs.ingest.checkpoints import MANIFESTS_OF_AN_IMPORT, ingest_checkpoints, store_final
from runs.ingest.leases import Leases, read_leases, store_leases
from runs.ingest.stores import store_for
from runs.metrics import healing
from runs.metrics.changes import Changes
from runs.models import (
    Alert,
    Archive,
    Credential,
    Event,
    Journal,
    Replica,
    ReplicaAttempt,
    ReplicaPool,
    Run,
    Webhook,
)
from runs.reconcile.billing import cost_usd
from runs.restore.bucket_reader import (
    document,
    final,
    next_command,
    read_rounds,
    read_telemetry,
)
from runs.restore.columns import columns, moment
from runs.restore.journal_reader import Told, read_journal
from runs.states import RUN_ENDED, ReplicaState, RunState
from runs.submit.create import rendezvous_uri
from runs.submit.prefixes import check_free, lock
from runs.submit.uploads import ARCHIVE_BYTES, store_archive
from runs.transitions import record_event

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=models.Model)

IMPORTING = "being imported"
ABANDONED_AFTER = timedelta(days=1)
"""An import that began so long ago was killed, so that it could not remove what it had stored."""
OWN_CLOCK: Mapping[str, frozenset[str]] = {
    "Run": frozenset({"last_seen_at", "committed_at"}),
    "Replica": frozenset({"beat_at", "beat_observed_s", "beat_judged"}),
    "TelemetryCursor": frozenset({"moved_at"}),
}
"""Columns that say when a control plane saw something: an import saw it just now."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """``remarks`` are what could not be taken over, for whoever asked."""

    run: Run
    remarks: tuple[str, ...]


def import_run(uri: str, *, owner: User | None = None, credential: str = "") -> Imported:
    """Rebuild the run whose rendezvous is ``uri``.

    ``owner`` None is whoever the journal names, if there is a user of that name. ``credential``
    names the one that opens the bucket. Raises :class:`CannotDo`, or
    :class:`~diloco.store.base.StoreError` where the bucket cannot be read.
    """
    return _Import(uri, owner, credential).run()


def remove_abandoned(now: datetime) -> int:
    """Remove what imports that were killed have left behind; how many runs."""
    left = Run.objects.filter(
        state=RunState.CANCELLED, state_reason=IMPORTING, state_since__lt=now - ABANDONED_AFTER
    )
    removed = 0
    for run in left:
        logger.warning("import of %s did not come to its end; what it stored is removed", run)
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
        """Whatever goes wrong, nothing of the run stays behind."""
        try:
            return self._run()
        except (CannotDo, InvalidRun):
            self._clean_up()
            raise
        except BaseException as error:
            self._clean_up()
            if isinstance(
                error, ValueError | TypeError | LookupError | OverflowError | DatabaseError
            ):
                logger.warning("import of %s", self.uri, exc_info=error)
                raise CannotDo(
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
        told = read_journal(store)
        self._losses(told)
        leases = read_leases(store)
        run = self._stub(group, draft, told)
        self.stub = run.pk
        self._people(run, told, leases)
        changes, now = Changes(), timezone.now()
        read_rounds(run, store, now, changes, resumed=_resumed(told))
        open_attempts = (a for a in told.attempts.values() if a.get("ended_at") is None)
        busy = frozenset(attempt.get("replica", -1) for attempt in open_attempts)
        self.remarks += read_telemetry(run, store, leases, changes, busy=busy)
        ingest_checkpoints(run, store, now=now, at_most=MANIFESTS_OF_AN_IMPORT)
        result = final(run, store, self.remarks)
        if result is not None:
            store_final(run, store, result, now=now)
        store_leases(run, list(run.replicas.all()), leases, now=now)
        with transaction.atomic():
            self._attempts(run, told)
            self._alerts(run, told)
            self._events(run, told)
            # Only now: events say who was catching up.
            healing.mark(run, run.rounds.order_by("number").defer("timings"))
            self._remark(run)
            self._states(run, told, store, reason=result.reason if result else "")
        run.refresh_from_db()
        return Imported(run=run, remarks=tuple(self.remarks))

    def _losses(self, told: Told) -> None:
        """A journal with objects missing is enough of a run that is over: its last state is there,
        and what is lost is named. Of a live one, a lost object may hold a job that still runs."""
        self.remarks += [f"not read: {refused}" for refused in told.refused]
        if told.refused and told.run.get("state") not in RUN_ENDED:
            raise CannotDo(
                "expected the whole journal of a run that has not ended, as its jobs are known "
                f"from there alone: {'; '.join(told.refused[:5])}"
            )

    def _remark(self, run: Run) -> None:
        """What could not be taken over, as an event of the run."""
        if self.remarks:
            record_event(
                run, "import", f"imported with losses: {'; '.join(self.remarks)}",
                level=Event.Level.WARNING,
            )  # fmt: skip

    def _opener(self) -> Credential | None:
        if not self.credential:
            return None
        found = Credential.objects.filter(name=self.credential, kind="store").first()
        if found is None:
            raise CannotDo(f"expected a credential of kind store, found none {self.credential!r}")
        return found

    @transaction.atomic
    def _stub(self, document: GroupDocument, draft: Run, told: Told) -> Run:
        """The run, so that rows can point at it; nothing looks after it yet."""
        lock()  # of a submission and an import of one prefix the second finds the first
        pk = run_id(document, draft.rendezvous)
        known = (
            Run.objects.filter(pk=pk).first()
            or Run.objects.filter(rendezvous=draft.rendezvous).first()
        )
        if known is not None and known.state_reason == IMPORTING:
            known.delete()  # of an import that did not come to its end
        elif known is not None:
            raise CannotDo(f"expected a run that is not here yet, found {known.name!r} ({pk})")
        check_free(canonical(draft.rendezvous, resolve=False), viewer=self.owner, but=pk)
        owner = self.owner or User.objects.filter(username=told.run.get("owner", "")).first()
        if owner is None:
            name = told.run.get("owner")
            said = (
                f"the journal says {name!r}, whom there is not" if name else "the bucket says none"
            )
            raise CannotDo(f"expected an owner: {said}; name one")
        now = timezone.now()
        if self.credential == "" and told.run.get("store_credential"):
            draft.store_credential = self._credential(told.run["store_credential"], "store")
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
            created_at=moment(told.run.get("created_at")) or now,
            first_step_at=moment(told.run.get("first_step_at")),
        )

    def _credential(self, name: Any, kind: str) -> Credential | None:
        found = Credential.objects.filter(name=str(name), kind=kind).first()
        if found is None:
            self.remarks.append(f"there is no credential {name!r} for {kind}; none is used")
        return found

    def _people(self, run: Run, told: Told, leases: Leases) -> None:
        """Pools and replicas: those of the journal, and whoever beat beside them."""
        now = timezone.now()
        pools: dict[int, ReplicaPool] = {}
        for place, body in sorted(told.pools.items()):
            pool = ReplicaPool(run=run, **columns(ReplicaPool, body, journal.POOL))
            if body.get("credential"):
                pool.credential = self._credential(body["credential"], pool.backend)
            self._set_adder(pool, body.get("added_by"))
            pools[place] = _stored(pool)
        beat = {number for number, _ in leases.incarnations}
        unknown = len(beat - set(told.replicas))
        for number in sorted(beat | set(told.replicas)):
            body = told.replicas.get(number, {})
            place = body.get("pool", -1)
            if place not in pools:
                pools[place] = _stored(
                    ReplicaPool(run=run, backend="external", hardware="unknown", count=unknown)
                )
            pool = pools[place]
            _stored(
                Replica(
                    run=run, pool=pool, number=number, state=ReplicaState.EVICTED, state_since=now
                )
            )

    def _set_adder(self, pool: ReplicaPool, name: str | None) -> None:
        """The journal is no authority on permissions: any process of the run can write it. A pool
        that another user than the run's owner has added runs with the owner's."""
        owner = pool.run.owner
        if name == owner.get_username():
            pool.added_by = owner
        elif name is not None:
            self.remarks.append(
                f"pool {pool} was added by {name!r}; it runs with the permissions of the run's "
                f"owner {owner.get_username()!r}"
            )

    def _attempts(self, run: Run, told: Told) -> None:
        replicas = {r.number: r for r in run.replicas.all()}
        names = (*journal.ATTEMPT, *journal.WHEN_ENDED)
        known: set[tuple[int, int]] = set()
        for key, body in told.attempts.items():
            replica = replicas.get(body["replica"])
            if replica is None:
                self.remarks.append(f"attempt {key}: there is no replica {body['replica']}")
                continue
            place = (body["replica"], body["number"])
            if place in known:
                raise CannotDo(f"journal: attempts: expected one attempt {place}, found another")
            known.add(place)
            attempt = ReplicaAttempt(replica=replica, **columns(ReplicaAttempt, body, names))
            if attempt.ended_at is None:
                attempt.cost_usd = cost_usd(
                    price_usd_h=attempt.price_usd_h, launched_at=attempt.launched_at,
                    started_at=attempt.started_at, ended_at=None, now=timezone.now(),
                    earlier_usd=attempt.earlier_cost_usd,
                )  # fmt: skip
            _stored(attempt)

    def _alerts(self, run: Run, told: Told) -> None:
        """As they were: what is open is not opened, nor told of, once more."""
        replicas = {r.number: r for r in run.replicas.all()}
        names = {body.get("acknowledged_by") for body in told.alerts.values()} - {None}
        people = {user.username: user for user in User.objects.filter(username__in=names)}
        for body in told.alerts.values():
            alert = Alert(run=run, **columns(Alert, body, journal.ALERT))
            alert.replica = replicas.get(body.get("replica", -1))
            alert.acknowledged_by = people.get(str(body.get("acknowledged_by")))
            _stored(alert)

    def _notify(self, names: list[str] | None) -> list[int] | None:
        if names is None:
            return None
        found = dict(Webhook.objects.filter(name__in=names).values_list("name", "pk"))
        if missing := sorted(set(map(str, names)) - set(found)):
            self.remarks.append(f"there is no webhook {', '.join(missing)}; it is not told")
        return sorted(found.values())

    def _events(self, run: Run, told: Told) -> None:
        """Those of the journal, as they were; of what reading found just now, what is not there."""
        found = list(run.events.order_by("pk"))
        run.events.all().delete()
        replicas: dict[Any, Replica] = {r.number: r for r in run.replicas.all()}
        names = {body.get("actor") for body in told.events} - {None}
        actors: dict[Any, User] = {
            user.username: user for user in User.objects.filter(username__in=names)
        }
        if missing := sorted(map(str, names - set(actors))):
            self.remarks.append(f"events by {', '.join(missing)}, who are no users here: no actor")
        events = [
            Event(
                run=run,
                replica=replicas.get(body.get("replica", -1)),
                actor=actors.get(body.get("actor", "")),
                **columns(Event, body, journal.EVENT),
            )
            for body in told.events
        ]
        known = {(e.kind, e.replica_id, e.message) for e in events}
        events += [e for e in found if (e.kind, e.replica_id, e.message) not in known]
        for event in events:
            event.pk = None
        Event.objects.bulk_create(events)

    def _states(self, run: Run, told: Told, store: Store, *, reason: str) -> None:
        for number, body in told.replicas.items():
            names = (*journal.REPLICA, *journal.WHEN_NOT_WORKING)
            fields = columns(Replica, body, names)
            if fields.get("pending_cause", "") not in ("", *PendingCause):
                raise CannotDo(
                    f"journal: Replica pending_cause: expected one of {', '.join(PendingCause)}, "
                    f"found {abridged(fields['pending_cause'])}"
                )
            if "state" not in fields:  # it was at work: its next beat says how
                fields |= {"state": ReplicaState.SYNCING, "state_reason": "imported"}
            Replica.objects.filter(run=run, number=number).update(**fields)
        archive, told_notify = told.run.get("archive"), told.run.get("notify")
        fields = columns(Run, told.run, (*journal.RUN, *journal.WHEN_NOT_LIVE))
        if not told.run:
            fields = _state_without_journal(reason)
        fields["notify"] = self._notify(told_notify if isinstance(told_notify, list) else None)
        if archive and Archive.objects.filter(pk=archive).exists():
            fields["archive_id"] = archive
        elif archive:
            fields["archive_id"] = self._archive(store, str(archive))
        spent = ReplicaAttempt.objects.filter(replica__run=run).aggregate(sum=Sum("cost_usd"))
        fields.setdefault("cost_usd", spent["sum"] or 0.0)
        fields["next_command"] = next_command(store)
        run.refresh_from_db(fields=["committed_rounds"])
        fields["watched_round"] = run.committed_rounds  # alerts about them are the journal's
        Run.objects.filter(pk=run.pk).update(**fields)
        events = list(run.events.order_by("pk").values_list("pk", flat=True))
        Journal.objects.create(
            run=run,
            next_n=told.next_n,
            event_id=max(events, default=0),
            seen={"events": events[-journal.WINDOW :]},
        )

    def _archive(self, store: Store, sha256: str) -> str | None:
        try:
            data = store.get(keys.code_bundle(sha256), limit=ARCHIVE_BYTES)
            archive = store_archive(data)
        except (MissingKey, ObjectTooLarge, InvalidRun, ValueError) as error:
            self.remarks.append(f"the archive of user code is not taken over: {error}")
            return None
        return archive.pk if archive and archive.pk == sha256 else None


def _check_owner(store: Store, group: GroupDocument) -> None:
    """Raises :class:`CannotDo` where the prefix's marker names another run than ``group.json``:
    one of the two was replaced. A group that was made without a control plane has no marker."""
    try:
        owner = ownership.owner_of(store)
    except ownership.PrefixTaken as error:
        raise CannotDo(str(error)) from None
    if owner is not None and owner != group.run_id:
        raise CannotDo(
            f"{store.uri}: expected {keys.OWNER} and {keys.GROUP} of one run, found run "
            f"{abridged(owner)} in the first and run {abridged(group.run_id)} in the second"
        )


def run_id(document: GroupDocument, uri: str) -> uuid.UUID:
    """The run's own id; one made of its place where it never had any of this kind."""
    try:
        return uuid.UUID(document.run_id)
    except ValueError:
        return uuid.uuid5(uuid.NAMESPACE_URL, f"{uri}#{document.run_id}")


def _state_without_journal(reason: str) -> dict[str, Any]:
    now = timezone.now()
    over = {"started_at": None, "ended_at": now, "state_since": now}
    if reason and reason != "stopped":
        return {**over, "state": RunState.SUCCEEDED, "state_reason": "imported; it was completed"}
    words = "imported; no control plane looked after it"
    return {**over, "state": RunState.CANCELLED, "state_reason": words}


def _resumed(told: Told) -> list[datetime]:
    """When the run was sent on, each time."""
    back = (e for e in told.events if e.get("to_state") == RunState.QUEUED and e.get("from_state"))
    found = [moment(event.get("at")) for event in back if event["from_state"] != RunState.DRAFT]
    return [at for at in found if at is not None]


def _stored(row: M) -> M:
    row.save(force_insert=True)
    return row
