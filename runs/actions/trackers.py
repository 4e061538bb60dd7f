"""Add, change and remove experiment trackers, and mirror runs to them.

Each change of a tracker is in the audit log, each change of a mirror is an event of its run.
"""

from __future__ import annotations

from collections.abc import Mapping

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.utils import timezone

from diloco.trackers.opening import KINDS, Destination
from runs import audit, outbound
from runs.actions.saving import AlreadyUsed, DeletedMeanwhile, save
from runs.credentials.tracker_addresses import ADDRESS, move_address
from runs.credentials.vault import DecryptionError, seal, unseal
from runs.exceptions import ActionRefused, InvalidRun
from runs.models import ExperimentTracker, Run, RunMirror
from runs.task_queue import enqueue
from runs.trackers.mirror import destination_of
from runs.transitions import record_event

NAME_LENGTH = 80


def save_tracker(
    name: str,
    destination: Destination,
    *,
    secrets: Mapping[str, str],
    actor: User,
    tracker: ExperimentTracker | None = None,
    enabled: bool = True,
) -> ExperimentTracker:
    """Create a tracker, or change ``tracker``.

    An empty secret keeps the stored one, unless the address changes: no stored secret is sent to
    another address. Raises :class:`InvalidRun` with the field (``name``, ``server``, or the name of
    a secret) and what to enter.
    """
    name = name.strip()
    if not 1 <= len(name) <= NAME_LENGTH:
        raise InvalidRun("name", f"expected 1 to {NAME_LENGTH} characters, found {len(name)}")
    kind = KINDS[destination.kind]
    if unknown := sorted(set(secrets) - set(kind.secrets)):
        raise InvalidRun("", f"{kind.label} uses no {unknown[0]}")
    if destination.has_address:
        try:
            outbound.check_url(destination.address)
        except ValueError as error:
            raise InvalidRun("server", str(error)) from None
    row = tracker or ExperimentTracker(created_by=actor, created_at=timezone.now())
    entered = {key: value.strip() for key, value in secrets.items() if value.strip()}
    values = _kept_secrets(row, destination, has_new=bool(entered)) | entered
    before = (row.kind, row.server, row.project)
    row.name, row.enabled, row.kind = name, enabled, destination.kind
    row.server, row.project = destination.server.strip(), destination.project.strip()
    row.sealed = seal(values) if values else ""
    try:
        with transaction.atomic():
            save(row)
            if tracker and before != (row.kind, row.server, row.project):
                _restart_mirrors(row)
            audit.record(
                "tracker.changed" if tracker else "tracker.added",
                actor=actor,
                target=f"tracker {name}",
                detail=f"{kind.label} {row.server} {row.project}".strip(),
            )
    except AlreadyUsed:
        raise InvalidRun("name", f"expected an unused name, found {name!r}") from None
    except DeletedMeanwhile:
        raise InvalidRun("", f"{name} has been deleted meanwhile") from None
    return row


def _kept_secrets(
    row: ExperimentTracker, destination: Destination, *, has_new: bool
) -> dict[str, str]:
    """The stored secrets that the tracker keeps. Raises :class:`InvalidRun` if its address changes
    and no secret was entered for it."""
    if not row.sealed:
        return {}
    first = next(iter(KINDS[destination.kind].secrets), "")
    try:
        stored = unseal(row.sealed, name=f"tracker {row.name}")
    except DecryptionError as error:
        if has_new:
            return {}
        raise InvalidRun(first, f"{error} Or enter the secrets again") from None
    stored.pop(ADDRESS, None)
    try:
        move_address(row)
        before = destination_of(row).address
    except ValueError:  # stored by an earlier version, which did not check it
        before = None
    if before != destination.address:
        if not has_new:
            raise InvalidRun(
                min(stored, default=first),
                f"the address has changed, so enter {' and '.join(sorted(stored))} again, or add a "
                "tracker for the new address. A stored secret is never sent to another address",
            )
        return {}
    return {key: stored[key] for key in KINDS[destination.kind].secrets if key in stored}


def _restart_mirrors(tracker: ExperimentTracker) -> None:
    """Mirror all runs from their first point on: the new place has none of them. The rows are new
    ones, so that a pass that is under way does not advance them."""
    mirrors, now = RunMirror.objects.filter(tracker=tracker), timezone.now()
    again = [
        RunMirror(run_id=run, tracker=tracker, state=state, next_at=now, created_at=created)
        for run, state, created in mirrors.values_list("run_id", "state", "created_at")
    ]
    mirrors.delete()
    RunMirror.objects.bulk_create(again)


def delete_tracker(tracker: ExperimentTracker, *, actor: User) -> None:
    """Delete a tracker and its mirrors. The tracker itself keeps what it received."""
    with transaction.atomic():
        audit.record("tracker.deleted", actor=actor, target=f"tracker {tracker.name}")
        tracker.delete()


def mirror_run(run: Run, name: str, *, actor: User) -> bool:
    """Mirror the run to the tracker from its first point on, or go on if it was stopped.

    False if it is mirrored already. Raises :class:`ActionRefused` for an unknown tracker.
    """
    enabled = ExperimentTracker.objects.filter(enabled=True)
    tracker = enabled.filter(name=name).first()
    if tracker is None:
        known = ", ".join(enabled.values_list("name", flat=True)) or "none yet"
        raise ActionRefused(f"expected a tracker ({known}), found {name[:80]!r}")
    now = timezone.now()
    stopped = RunMirror.objects.filter(run=run, tracker=tracker, state=RunMirror.State.STOPPED)
    with transaction.atomic():
        changed = bool(stopped.update(state=RunMirror.State.ACTIVE, next_at=now, failures=0))
        if not changed:
            changed = _create(run, tracker)
        if changed:
            message = f"metrics are mirrored to {tracker}"
            record_event(run, "mirror", message, actor=actor)
            enqueue("mirrors_due")
    return changed


def _create(run: Run, tracker: ExperimentTracker) -> bool:
    now = timezone.now()
    try:
        with transaction.atomic():
            RunMirror.objects.create(run=run, tracker=tracker, next_at=now, created_at=now)
    except IntegrityError:
        return False
    return True


def stop_mirror(run: Run, name: str, *, actor: User) -> bool:
    """Deliver no further points. False if the run is not mirrored to the tracker now."""
    active = RunMirror.objects.filter(run=run, tracker__name=name, state=RunMirror.State.ACTIVE)
    with transaction.atomic():
        stopped = bool(active.update(state=RunMirror.State.STOPPED))
        if stopped:
            record_event(run, "mirror", f"metrics are no longer mirrored to {name}", actor=actor)
    return stopped
