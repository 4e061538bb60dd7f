"""Creates a draft from an existing run: a clone starts afresh, a fork starts with its weights.

The draft fills the submit form for review. The worker that launches a fork copies the checkpoint
before ``group.json`` exists (:mod:`diloco.protocol.fork`).
"""

from __future__ import annotations

import secrets
import uuid
from dataclasses import replace
from datetime import datetime

from django.conf import settings as site

from diloco.protocol.fork import ForkError, fork_checkpoint
from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import WORKLOADS, WorkloadDocument
from diloco.store.base import Store
from diloco.store.location import canonical
from runs.exceptions import InvalidRun, LaunchFailed
from runs.ingest.stores import store_for
from runs.json_values import texts
from runs.models import Checkpoint, ReplicaPool, Run
from runs.submit import names
from runs.submit.evaluation_plans import draft_of
from runs.submit.run_draft import LIMITS, POOL_COLUMNS, Fork, PoolDraft, RunDraft
from runs.submit.tags import TAGS, is_tag

KEPT = 2
"""Newest checkpoints of a run whose weights are kept."""


def clone_of(run: Run) -> RunDraft:
    """A draft with the run's submitted values and the current sizes of its pools."""
    pools = tuple(_pool(pool) for pool in run.pools.order_by("pk"))
    settings = GroupSettings.from_dict(run.settings.to_dict())
    count = sum(pool.count for pool in pools)
    starts = {settings.num_replicas: count}
    return RunDraft(
        name=names.suggest_copy(run.name),
        settings=replace(
            settings,
            num_replicas=count,
            start_replicas=starts.get(settings.start_replicas, settings.start_replicas),
        ),
        workload=WORKLOADS[run.workload["kind"]].from_dict(run.workload),
        pools=pools,
        rendezvous=_sibling_prefix(run),
        **{name: getattr(run, name) for name in LIMITS},
        store_credential=run.store_credential_id,
        archive=bytes(run.archive.data) if run.archive else b"",
        notify=None if run.notify is None else tuple(run.notify),
        trackers=tuple(run.mirrors.values_list("tracker_id", flat=True)),
        evaluations=tuple(map(draft_of, run.evaluation_plans.filter(enabled=True))),
        tags=tuple(filter(is_tag, texts(run.tags)))[:TAGS],
    )


def fork_of(run: Run, round: int) -> RunDraft:
    """A draft that starts with the run's checkpoint of ``round`` and the state of its outer
    optimizer."""
    draft = clone_of(run)
    return replace(
        draft,
        name=names.suggest(_named(run.name, f"from round {round}")),
        fork=Fork(run=run.pk, round=round, outer=True),
    )


def forkable(run: Run) -> list[int]:
    """Rounds whose checkpoint is complete, newest first."""
    checkpoints = Checkpoint.objects.filter(run=run, final=False).order_by("-round")
    return list(checkpoints.values_list("round", flat=True)[:KEPT])


def check_fork(fork: Fork, draft: RunDraft) -> None:
    """Raise :class:`InvalidRun` for a fork that would fail at launch, as far as the tables show."""
    run = Run.objects.filter(pk=fork.run).first()
    if run is None:
        raise InvalidRun("fork_round", "expected a run to fork from, found none")
    rounds = forkable(run)
    if fork.round not in rounds:
        kept = ", ".join(map(str, rounds)) or "none"
        raise InvalidRun(
            "fork_round", f"expected a checkpoint that is kept ({kept}), found round {fork.round}"
        )
    check_model(run, draft.workload)
    source = run.settings
    if (source.frozen, draft.settings.frozen) == ("local", "equal"):
        raise InvalidRun(
            "frozen",
            f"expected 'local' as in {run.name!r}, whose checkpoints have no digests of frozen "
            "parameters to compare replicas with, found 'equal'",
        )
    for name in ("num_fragments", "fragment_pattern") if fork.outer else ():
        expected, actual = getattr(source, name), getattr(draft.settings, name)
        if expected != actual:
            raise InvalidRun(
                name,
                f"expected {expected!r} as in {run.name!r}, because this run continues with its "
                f"outer optimizer state, found {actual!r}",
            )


def check_model(run: Run, workload: WorkloadDocument) -> None:
    """Raise :class:`InvalidRun` unless the workload has the model of ``run``."""
    kind, found = run.workload.get("kind"), workload.to_dict()
    if found["kind"] != kind:
        raise InvalidRun("workload", f"expected {kind!r} as in {run.name!r}, found {workload.kind}")
    for name in workload.model_fields:
        if found[name] != run.workload.get(name):
            raise InvalidRun(
                name,
                f"expected {run.workload.get(name)!r} as in {run.name!r}, whose weights this run "
                f"starts with, found {found[name]!r}",
            )


def copy_fork_checkpoint(run: Run, store: Store, *, now: datetime) -> None:
    """Copy the source run's checkpoint as the first one of this run. Raises
    :class:`LaunchFailed`."""
    if run.forked_from is None:
        return
    source = Run.objects.filter(pk=run.forked_from).first()
    if source is None:
        raise LaunchFailed("expected the run that it is forked from, found none")
    try:
        fork_checkpoint(
            store_for(source),
            run.fork_round,
            store,
            theirs=source.settings,
            ours=run.settings,
            outer=run.fork_outer,
            wall_s=now.timestamp(),
        )
    except ForkError as error:
        raise LaunchFailed(str(error)) from error


def _pool(pool: ReplicaPool) -> PoolDraft:
    return PoolDraft(
        **{name: getattr(pool, name) for name in POOL_COLUMNS},
        count=max(pool.count, 1),
        credential=pool.credential_id,
        price_usd_h=pool.price_usd_h if pool.price_given else None,
    )


def _named(name: str, suffix: str) -> str:
    tail = f" ({suffix})"
    return name[: names.NAME_LENGTH - len(tail)] + tail


def _sibling_prefix(run: Run) -> str:
    """A prefix next to the run's own; '' if the run uses a generated one under the default."""
    parent = run.rendezvous.rpartition("/")[0]
    try:
        uuid.UUID(run.rendezvous.rpartition("/")[2])
    except ValueError:
        return f"{run.rendezvous}-{secrets.token_hex(3)}"
    default = canonical(site.DEFAULT_RENDEZVOUS).uri
    return "" if parent == default else f"{parent}/{uuid.uuid4()}"
