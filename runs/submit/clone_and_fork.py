"""A new run out of another: a clone begins anew with the same draft, a fork with its weights.

A draft is made here and filled into the submit form, where somebody looks at it; a fork's
checkpoint is copied by the worker that launches it, before there is a ``group.json``
(:mod:`diloco.protocol.fork`).
"""

from __future__ import annotations

import secrets
import uuid
from dataclasses import replace
from datetime import datetime

from django.conf import settings as site

from diloco.protocol.fork import CannotPlant, plant
from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import WORKLOADS
from diloco.store.base import Store
from diloco.store.location import canonical
from runs.exceptions import InvalidRun, LaunchFailed
from runs.ingest.stores import store_for
from runs.models import Checkpoint, ReplicaPool, Run
from runs.submit.run_draft import Fork, PoolDraft, RunDraft, Workload

NAME_LENGTH = 80
KEPT = 2
"""Newest checkpoints of a run whose objects are not swept."""

_MODEL = {
    "byte_gpt": ("size",),
    "huggingface": ("model", "revision", "config"),
    "custom": ("function",),
}
"""By kind: what of a workload makes the model."""


def clone_of(run: Run) -> RunDraft:
    """The run as it was asked for, its pools as large as they are wanted now."""
    pools = tuple(_pool(pool) for pool in run.pools.order_by("pk"))
    settings = GroupSettings.from_dict(run.group_settings)
    count = sum(pool.count for pool in pools)
    starts = {settings.num_replicas: count}
    return RunDraft(
        name=_named(run.name, "copy"),
        settings=replace(
            settings,
            num_replicas=count,
            start_replicas=starts.get(settings.start_replicas, settings.start_replicas),
        ),
        workload=WORKLOADS[run.workload["kind"]].from_dict(run.workload),
        pools=pools,
        rendezvous=_beside(run),
        time_limit_s=run.time_limit_s,
        budget_usd=run.budget_usd,
        start_timeout_s=run.start_timeout_s,
        max_restarts=run.max_restarts,
        store_credential=run.store_credential_id,
        archive=bytes(run.archive.data) if run.archive else b"",
        notify=None if run.notify is None else tuple(run.notify),
    )


def fork_of(run: Run, round: int, *, outer: bool = True) -> RunDraft:
    draft = clone_of(run)
    return replace(
        draft,
        name=_named(run.name, f"from round {round}"),
        fork=Fork(run=run.pk, round=round, outer=outer),
    )


def forkable(run: Run) -> list[int]:
    """Rounds whose checkpoint is still whole, newest first."""
    found = Checkpoint.objects.filter(run=run, final=False).order_by("-round")
    return list(found.values_list("round", flat=True)[:KEPT])


def check_fork(fork: Fork, draft: RunDraft) -> None:
    """Raises :class:`InvalidRun` for what the launch could not do, as far as the tables know."""
    run = Run.objects.filter(pk=fork.run).first()
    if run is None:
        raise InvalidRun("fork_round", "expected a run to fork from, found that it is gone")
    rounds = forkable(run)
    if fork.round not in rounds:
        kept = ", ".join(map(str, rounds)) or "none"
        raise InvalidRun(
            "fork_round", f"expected a checkpoint that is kept ({kept}), found round {fork.round}"
        )
    check_model(run, draft.workload)
    theirs = GroupSettings.from_dict(run.group_settings)
    for name in ("num_fragments", "fragment_pattern") if fork.outer else ():
        expected, found = getattr(theirs, name), getattr(draft.settings, name)
        if expected != found:
            raise InvalidRun(
                name,
                f"expected {expected!r} as in {run.name!r}, because its outer optimizer's state is "
                f"taken over, found {found!r}",
            )


def check_model(run: Run, workload: Workload) -> None:
    kind, found = run.workload.get("kind"), workload.to_dict()
    if found["kind"] != kind:
        raise InvalidRun("workload", f"expected {kind!r} as in {run.name!r}, found {workload.kind}")
    for name in _MODEL[workload.kind]:
        if found[name] != run.workload.get(name):
            raise InvalidRun(
                name,
                f"expected {run.workload.get(name)!r} as in {run.name!r}, whose weights this run "
                f"begins with, found {found[name]!r}",
            )


def plant_fork(run: Run, store: Store, *, now: datetime) -> None:
    """Make the other run's checkpoint this one's first. Raises :class:`LaunchFailed`."""
    if run.forked_from is None:
        return
    source = Run.objects.filter(pk=run.forked_from).first()
    if source is None:
        raise LaunchFailed("expected the run it is forked from, found that it is gone")
    try:
        plant(
            store_for(source), run.fork_round, store,
            theirs=GroupSettings.from_dict(source.group_settings),
            ours=GroupSettings.from_dict(run.group_settings),
            outer=run.fork_outer, wall_s=now.timestamp(),
        )  # fmt: skip
    except CannotPlant as error:
        raise LaunchFailed(str(error)) from error


def _pool(pool: ReplicaPool) -> PoolDraft:
    return PoolDraft(
        backend=pool.backend,
        hardware=pool.hardware,
        count=max(pool.count, 1),
        region=pool.region,
        spot=pool.spot,
        image=pool.image,
        timeout_s=pool.timeout_s,
        options=pool.options,
        credential=pool.credential_id,
        price_usd_h=pool.price_usd_h if pool.price_given else None,
        max_price_usd_h=pool.max_price_usd_h,
    )


def _named(name: str, what: str) -> str:
    tail = f" ({what})"
    return name[: NAME_LENGTH - len(tail)] + tail


def _beside(run: Run) -> str:
    """A prefix beside the run's; '' where the run had one under the default."""
    parent = run.rendezvous.rpartition("/")[0]
    try:
        uuid.UUID(run.rendezvous.rpartition("/")[2])
    except ValueError:
        return f"{run.rendezvous}-{secrets.token_hex(3)}"
    default = canonical(site.DEFAULT_RENDEZVOUS).uri
    return "" if parent == default else f"{parent}/{uuid.uuid4()}"
