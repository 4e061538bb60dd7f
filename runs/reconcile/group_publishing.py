"""Writes a run's group into its bucket and verifies it: marker, code bundle and ``group.json``.

Every object is create-once. The group's fingerprint is in the database before ``group.json`` is in
the bucket, so that a repeated or interrupted launch recognises its own objects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from django.utils import timezone

from diloco.protocol import keys, ownership
from diloco.protocol.group_document import (
    GROUP_LIMIT,
    GroupDocument,
    ProtocolMismatch,
    fingerprint_of,
)
from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.store.base import MissingKey, ObjectTooLarge, Store
from runs.backends.code_bundle import make_bundle
from runs.exceptions import LaunchFailed
from runs.ingest.commands import send_resume
from runs.models import Run
from runs.states import RunState
from runs.submit.clone_and_fork import copy_fork_checkpoint


def group_document(run: Run, code_sha256: str) -> GroupDocument:
    return GroupDocument(
        run_id=str(run.pk),
        name=run.name,
        settings=GroupSettings.from_dict(run.settings.to_dict()),
        workload=run.workload,
        code=code_sha256,
    )


def publish_group(run: Run, store: Store) -> None:
    """Create the prefix's marker, ``code/<sha>.zip`` and ``group.json``.

    Raises :class:`LaunchFailed` if there is another run's ``group.json``, or without one, any other
    foreign object.
    """
    existing = _existing_group(store)
    if existing is None:
        _claim(run, store, ownership.claim)
        bundle = make_bundle()
        document = group_document(run, bundle.sha256)
        Run.objects.filter(pk=run.pk, state=RunState.QUEUED).update(
            code_sha256=bundle.sha256, group_fingerprint=document.fingerprint
        )
        store.create(keys.code_bundle(bundle.sha256), bundle.data)
        if run.archive is not None:
            store.create(keys.code_bundle(run.archive.sha256), bytes(run.archive.data))
        copy_fork_checkpoint(run, store, now=timezone.now())
        if not store.create(keys.GROUP, document.to_bytes()):
            existing = _existing_group(store)
    run.refresh_from_db()
    if existing is None:
        return
    expected = group_document(run, run.code_sha256)
    if existing != expected.to_bytes():
        raise LaunchFailed(_difference(store.uri, expected, existing))
    _claim(run, store, ownership.mark)  # the run was launched before markers existed


def prepare_resume(run: Run, store: Store) -> None:
    """Prepare the bucket of a paused or ended run for continuing.

    Raises :class:`LaunchFailed` if there are final weights: replicas would treat the run as ended.
    """
    with contextlib.suppress(MissingKey):
        store.get_range(keys.FINAL_MANIFEST, 0, 1)
        raise LaunchFailed(
            f"{run.rendezvous}: expected no {keys.FINAL_MANIFEST}, found one; a finished run can't "
            "be resumed, fork a new run from its newest checkpoint"
        )
    send_resume(run, store, timezone.now())


def check_group(run: Run, store: Store) -> None:
    """Raise :class:`LaunchFailed` unless ``group.json`` is unchanged since the launch: replicas
    follow it. A damaged read is repeated once."""
    if not run.group_fingerprint:
        return
    fingerprint = ""
    for _ in range(2):
        data = _existing_group(store)
        if data is None:
            raise LaunchFailed(f"{store.uri}: expected {keys.GROUP}, found none")
        fingerprint = fingerprint_of(data)
        if fingerprint == run.group_fingerprint:
            return
    raise LaunchFailed(
        f"{store.uri}: expected {keys.GROUP} with fingerprint {run.group_fingerprint}, as written "
        f"at the launch; found {fingerprint or 'an unreadable document'}"
    )


def _claim(run: Run, store: Store, make: Callable[[Store, str], None]) -> None:
    try:
        make(store, str(run.pk))
    except ownership.PrefixTaken as error:
        raise LaunchFailed(str(error)) from None


def _existing_group(store: Store) -> bytes | None:
    try:
        return store.get(keys.GROUP, limit=GROUP_LIMIT)
    except MissingKey:
        return None
    except ObjectTooLarge as error:
        raise LaunchFailed(f"{store.uri}: expected {keys.GROUP} of this run: {error}") from None


def _difference(uri: str, expected: GroupDocument, existing: bytes) -> str:
    try:
        other = GroupDocument.from_bytes(existing)
    except (SettingsError, ProtocolMismatch) as error:
        return f"{uri}: expected no {keys.GROUP} or this run's, found one that is not: {error}"
    if other.run_id != expected.run_id:
        return (
            f"{uri}: expected an unused rendezvous for run {expected.run_id}, "
            f"found {keys.GROUP} of run {other.run_id} ({other.name!r})"
        )
    return (
        f"{uri}: expected {keys.GROUP} with fingerprint {expected.fingerprint}, "
        f"found {other.fingerprint}"
    )
