"""Creates a run from a draft: validates everything and stores one run per submit key."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypeVar

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.db.models import Max
from django.utils import timezone

from diloco.protocol.workload import CustomWorkload
from diloco.store.location import canonical
from runs.backends import budgets
from runs.credentials import check_store
from runs.exceptions import ActionRefused, InvalidRun
from runs.local_access import first_refused
from runs.models import (
    Archive,
    ExperimentTracker,
    Replica,
    ReplicaPool,
    Run,
    RunMirror,
    Sweep,
)
from runs.states import RunState
from runs.submit import prefixes
from runs.submit.clone_and_fork import check_fork
from runs.submit.data_check import refuse_data
from runs.submit.evaluation_plans import check_plans, new_plan
from runs.submit.pool_check import check_pool, credential_of, pool_price
from runs.submit.run_draft import LIMITS, POOL_COLUMNS, Fork, PoolDraft, RunDraft
from runs.submit.tags import parse_tags
from runs.submit.uploads import (
    check_archive,
    check_function,
    is_installed,
    kept_archive,
    store_archive,
)
from runs.task_queue import enqueue
from runs.transitions import record_event

NAME_LENGTH = 80
SUBMIT_KEY_LENGTH = 64

R = TypeVar("R", Run, Sweep)


WAITING = "waiting for a worker"
SWEEP_HELD = "waiting for its turn in the sweep"


@dataclass(frozen=True, kw_only=True)
class SweepPlace:
    """The place of a run in a sweep, and the values that it has of the swept fields."""

    sweep: Sweep
    index: int
    values: Mapping[str, Any]
    held: bool

    def columns(self) -> dict[str, Any]:
        return {
            "sweep": self.sweep,
            "sweep_index": self.index,
            "sweep_values": dict(self.values),
            "sweep_held": self.held,
        }


@dataclass(frozen=True, kw_only=True)
class CheckedDraft:
    """A valid draft, with the id and the rendezvous that its run will have."""

    draft: RunDraft
    run_id: uuid.UUID
    rendezvous: str


def check_submission(draft: RunDraft, user: User) -> CheckedDraft:
    """Validate a draft and the permissions of ``user``. Raises :class:`InvalidRun`."""
    run_id = uuid.uuid4()
    check_local(draft, user)
    draft = replace(draft, tags=_checked_tags(draft.tags))
    check_budgets(user, draft.tags)
    rendezvous = check_draft(draft, run_id, viewer=user)
    return CheckedDraft(draft=draft, run_id=run_id, rendezvous=rendezvous)


def create_run(
    draft: RunDraft,
    *,
    owner: User,
    submit_key: str,
    preflight: Callable[[CheckedDraft], None] | None = None,
) -> Run:
    """Store the run with its pools and replicas as queued, and enqueue the launch on commit.

    Idempotent per ``submit_key``, also for concurrent requests: the second one gets the first one's
    run. Raises :class:`InvalidRun` with the names of the wrong form fields. ``preflight`` can
    refuse a valid draft before it is stored (:func:`runs.submit.preflight.require`).
    """

    def create() -> Run:
        checked = check_submission(draft, owner)
        if preflight is not None:
            preflight(checked)
        with transaction.atomic():
            return store_run(checked, owner, submit_key)

    return create_once(Run, submit_key, owner, create)


def is_submitted(model: type[R], submit_key: str) -> bool:
    """Whether a row was created with this key."""
    return model._default_manager.filter(submit_key=submit_key).exists()


def create_once(model: type[R], submit_key: str, owner: User, create: Callable[[], R]) -> R:
    """The row that was created with this key, otherwise the one that ``create`` stores."""
    if not submit_key or len(submit_key) > SUBMIT_KEY_LENGTH:
        raise InvalidRun(
            "submit_key", f"expected 1 to {SUBMIT_KEY_LENGTH} characters, found {len(submit_key)}"
        )
    existing = _submitted(model, submit_key, owner)
    if existing is not None:
        return existing
    try:
        return create()
    except (IntegrityError, InvalidRun):
        # Another request with this key can be faster: its run uses the rendezvous.
        existing = _submitted(model, submit_key, owner)
        if existing is None:
            raise
        return existing


def _submitted(model: type[R], submit_key: str, owner: User) -> R | None:
    row = model._default_manager.filter(submit_key=submit_key).first()
    if row is not None and row.owner_id != owner.pk:
        raise InvalidRun("submit_key", "another user sent this form; open it again")
    return row


def check_local(draft: RunDraft, user: User) -> None:
    """Raise :class:`InvalidRun` for a pool or an evaluation on this server that ``user`` has no
    permission for."""
    workload = draft.workload.to_dict()
    for name, parts in (("pools", draft.pools), ("evaluations", draft.evaluations)):
        if refused := first_refused(user, [part.backend for part in parts], workload):
            raise InvalidRun(f"{name}.{refused[0]}.backend", refused[1])


def check_budgets(owner: User, tags: Sequence[str]) -> None:
    """Raise :class:`InvalidRun` if a budget of the owner or a tag is spent."""
    if refusal := budgets.refusal(owner.pk, tags, timezone.now()):
        raise InvalidRun("", refusal)


def differing_field(run: Run, draft: RunDraft) -> str:
    """The first field that differs between a run and a draft sent again; '' for none. Fields that
    change while a run exists (replica counts, pools added later) are not compared."""
    settings, sent = dict(run.group_settings), draft.settings.to_dict()
    for changing in ("num_replicas", "max_replicas"):
        settings.pop(changing, None)
        sent.pop(changing, None)
    pools = list(run.pools.order_by("pk").values_list("backend", "hardware", "region", "spot"))
    stored_pools = pools[: len(draft.pools)]
    sent_pools = [(p.backend, p.hardware, p.region, p.spot) for p in draft.pools]
    compared = {
        "name": (run.name, draft.name.strip()),
        "settings": (settings, sent),
        "workload": (run.workload, draft.workload.to_dict()),
        "rendezvous": (run.rendezvous, rendezvous_uri(draft.rendezvous, run.pk)),
        **{name: (getattr(run, name), getattr(draft, name)) for name in LIMITS},
        "store_credential": (run.store_credential_id, draft.store_credential),
        "pools": (stored_pools, sent_pools),
    }
    return next((name for name, (was, now) in compared.items() if was != now), "")


def check_draft(draft: RunDraft, run_id: uuid.UUID, *, viewer: User | None = None) -> str:
    """Validate a draft and return its rendezvous URI. Raises :class:`InvalidRun`.

    ``viewer``: see :func:`runs.submit.prefixes.check_free`.
    """
    check_name(draft.name)
    _checked_tags(draft.tags)
    if not draft.pools:
        raise InvalidRun("pools", "expected at least one pool of replicas, found none")
    for index, pool in enumerate(draft.pools):
        check_pool(pool, index)
    total, target = sum(pool.count for pool in draft.pools), draft.settings.num_replicas
    if total != target:
        raise InvalidRun(
            "pools", f"expected pools that add up to the target of {target} replicas, found {total}"
        )
    for field in LIMITS:
        value = getattr(draft, field)
        if not 0 <= value < float("inf"):
            raise InvalidRun(field, f"expected 0 or more, found {value}")
    _check_budget(draft)
    _check_data(draft)
    if draft.fork is not None:
        check_fork(draft.fork, draft)
    _check_code(draft)
    check_plans(draft.evaluations, draft.workload.to_dict())
    rendezvous = rendezvous_uri(draft.rendezvous, run_id)
    if draft.store_credential is not None:
        store = credential_of(draft.store_credential, "store", "store_credential")
        if problem := check_store(store, rendezvous):
            raise InvalidRun("rendezvous", problem)
    prefixes.check_free(canonical(rendezvous, resolve=False), viewer=viewer)
    return rendezvous


def check_name(name: str) -> None:
    """Raise :class:`InvalidRun` for a name that no run or sweep can have."""
    length = len(name.strip())
    if not 1 <= length <= NAME_LENGTH:
        raise InvalidRun("name", f"expected 1 to {NAME_LENGTH} characters, found {length}")


def _checked_tags(tags: Sequence[str]) -> tuple[str, ...]:
    try:
        return tuple(parse_tags(tags))
    except ActionRefused as error:
        raise InvalidRun("tags", str(error)) from None


def _check_data(draft: RunDraft) -> None:
    """A local replica reads data with the rights of the server's own process, so refuse data
    outside the allowed locations."""
    data = str(getattr(draft.workload, "data", ""))
    is_address = bool(draft.workload.data_uri) or "://" in data or "::" in data
    if (is_address or data.startswith(("/", ".", "~"))) and (problem := refuse_data(data)):
        raise InvalidRun("data", problem)


def free_prefix(wanted: str, run_id: uuid.UUID, *, viewer: User) -> str:
    """The canonical URI of a prefix that a new run can use. Raises :class:`InvalidRun`."""
    location = prefixes.location_for(wanted, run_id)
    prefixes.check_free(location, viewer=viewer)
    return location.uri


def _check_code(draft: RunDraft) -> None:
    """Check that the function of a custom workload exists, as far as its source shows."""
    if not isinstance(draft.workload, CustomWorkload):
        return
    stored = None if draft.archive else _uploaded(draft)
    data = draft.archive if stored is None else bytes(stored.data)
    if data:
        check_archive(data)
        check_function(
            data,
            draft.workload.function,
            elsewhere=bool(draft.workload.requirements),
        )
    elif not draft.workload.requirements and all(p.backend == "local" for p in draft.pools):
        # Local replicas use this server's packages. The lookup does not import the module.
        module = draft.workload.function.partition(":")[0].partition(".")[0]
        if not is_installed(module):
            raise InvalidRun(
                "workload.archive",
                f"expected a zip with the module {module}, which is not installed here, found none",
            )


def _check_budget(draft: RunDraft) -> None:
    """A budget needs the price of every pool."""
    if not draft.budget_usd:
        return
    for index, pool in enumerate(draft.pools):
        if pool_price(pool) is None:
            raise InvalidRun(
                f"pools.{index}.price_usd_h",
                f"expected the price of an hour of {pool.backend} {pool.hardware}, because the run "
                "has a budget, found none in the catalogue",
            )


def rendezvous_uri(wanted: str, run_id: uuid.UUID) -> str:
    """The canonical URI of a prefix, whether or not another run uses it. Raises
    :class:`InvalidRun`."""
    return prefixes.location_for(wanted, run_id).uri


def store_run(
    checked: CheckedDraft, owner: User, submit_key: str, place: SweepPlace | None = None
) -> Run:
    """Store a checked run, and enqueue its launch unless its place in a sweep is held. Call inside
    a transaction."""
    draft, rendezvous = checked.draft, checked.rendezvous
    now = timezone.now()
    prefixes.lock()
    prefixes.check_free(canonical(rendezvous, resolve=False), viewer=owner)
    run = Run.objects.create(
        id=checked.run_id,
        name=draft.name.strip(),
        owner=owner,
        state=RunState.QUEUED,
        state_since=now,
        state_reason=SWEEP_HELD if place and place.held else WAITING,
        rendezvous=rendezvous,
        group_settings=draft.settings.to_dict(),
        workload=draft.workload.to_dict(),
        submit_key=submit_key,
        **{name: getattr(draft, name) for name in LIMITS},
        store_credential_id=draft.store_credential,
        archive=_archive(draft),
        notify=None if draft.notify is None else list(draft.notify),
        tags=list(draft.tags),
        **_origin(draft.fork),
        **(place.columns() if place else {}),
        created_at=now,
    )
    for pool_draft in draft.pools:
        store_pool(run, pool_draft)
    for tracker in ExperimentTracker.objects.filter(pk__in=draft.trackers):
        RunMirror.objects.create(run=run, tracker=tracker, next_at=now, created_at=now)
    for plan_draft in draft.evaluations:
        new_plan(run, plan_draft, actor=owner, now=now).save()
    record_event(
        run,
        "run_state",
        _submitted_message(draft),
        actor=owner,
        from_state=RunState.DRAFT,
        to_state=RunState.QUEUED,
    )
    if not run.sweep_held:
        enqueue("launch_run", str(run.pk))
    return run


def _archive(draft: RunDraft) -> Archive | None:
    """The draft's own zip, or else the uploaded one that its workload names."""
    return store_archive(draft.archive) if draft.archive else _uploaded(draft)


def _uploaded(draft: RunDraft) -> Archive | None:
    """The uploaded zip that the workload names, if it names one."""
    digest = getattr(draft.workload, "archive", "")
    archive = kept_archive(digest) if digest else None
    if digest and archive is None:
        raise InvalidRun("archive", f"expected the zip of sha256 {digest[:12]}…, found none")
    return archive


def _origin(fork: Fork | None) -> dict[str, Any]:
    if fork is None:
        return {}
    return {"forked_from": fork.run, "fork_round": fork.round, "fork_outer": fork.outer}


def _submitted_message(draft: RunDraft) -> str:
    if draft.fork is None:
        return "submitted"
    source = Run.objects.get(pk=draft.fork.run)
    return f"submitted, starting with round {draft.fork.round} of {source.name!r}"


def store_pool(run: Run, draft: PoolDraft, *, actor: User | None = None) -> ReplicaPool:
    """Store a pool and its pending replicas. Replica numbers are never reused within a run."""
    now = timezone.now()
    pool = ReplicaPool.objects.create(
        run=run,
        added_by=actor,
        **{name: getattr(draft, name) for name in POOL_COLUMNS},
        count=draft.count,
        credential_id=draft.credential,
        price_usd_h=pool_price(draft),
        price_given=draft.price_usd_h is not None,
    )
    add_replicas(pool, draft.count, now=now)
    return pool


def add_replicas(pool: ReplicaPool, count: int, *, now: datetime) -> list[Replica]:
    last = Replica.objects.filter(run=pool.run).aggregate(last=Max("number"))["last"]
    first = 0 if last is None else last + 1
    return Replica.objects.bulk_create(
        Replica(run=pool.run, pool=pool, number=number, state_since=now)
        for number in range(first, first + count)
    )
