"""Reads manifests of checkpoints and of the final result into the checkpoint table.

The text sample of the final weights, if there is one, is written shortly after their manifest.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from diloco.protocol import keys
from diloco.protocol.parallel_reads import read_each
from diloco.protocol.records import BadRecord, CheckpointManifest, FinalManifest, FinalSample
from diloco.store.base import ListingTooLong, MissingKey, Store
from runs.ingest.limits import count, finite
from runs.ingest.validation import check_record, refuse, wall
from runs.models import Checkpoint, Event, Round, Run
from runs.redaction import clean_text
from runs.states import RoundState

MANIFESTS_PER_TICK = 50
MANIFESTS_OF_AN_IMPORT = 10_000
MANIFESTS_AT_ONCE = 64
"""Manifests that an import keeps in memory, of up to a megabyte each."""
CHECKPOINTS_LISTED = 50_000
"""Objects. Old weights are deleted, their manifests are kept."""
SAMPLE_LIMIT = 16 * 1024
"""Bytes of the record. A replica writes about two thousand; the rest of a larger one is not
read."""
SAMPLE_LETTERS = 2000
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""Control characters other than tab and newline."""


def read_final(run: Run, store: Store) -> FinalManifest | None:
    """The final manifest; None if there is none or its round's commit is not ingested yet.

    Raises :class:`BadRecord` if the manifest is unreadable or names a round without a commit.
    Otherwise any process that can write to the bucket could end the run.
    """
    try:
        manifest = FinalManifest.read(store, keys.FINAL_MANIFEST)
    except MissingKey:
        return None
    check_record(manifest)
    number = manifest.round
    if number == 0 or (number < run.next_round and _is_committed(run, number)):
        return manifest
    if number < run.next_round:
        raise BadRecord(f"expected a round that was committed, found round {number}")
    try:
        store.get_range(keys.commit(number), 0, 1)
    except MissingKey:
        raise BadRecord(
            f"expected {keys.commit(number)} for the final round {number}, found none"
        ) from None
    if run.next_round == number:
        return None
    try:
        store.get_range(keys.commit(run.next_round), 0, 1)
    except MissingKey:
        raise BadRecord(
            f"expected {keys.commit(run.next_round)} before the final round {number}, found none"
        ) from None
    return None


def _is_committed(run: Run, number: int) -> bool:
    return Round.objects.filter(run=run, number=number, state=RoundState.COMMITTED).exists()


def ingest_checkpoints(
    run: Run,
    store: Store,
    *,
    now: datetime,
    at_most: int = MANIFESTS_PER_TICK,
    at_once: int = 1,
) -> None:
    """Store new manifests of rounds whose commits are ingested: the newest ``at_most``, of which
    ``at_once`` are read in parallel and stored together.

    Costs one listing and one GET per new manifest.
    """
    known = set(Checkpoint.objects.filter(run=run, final=False).values_list("round", flat=True))
    refused = Event.objects.filter(run=run, kind="refused", message__startswith=keys.CHECKPOINTS)
    named = {message.split(" ", 1)[0] for message in refused.values_list("message", flat=True)}
    try:
        listed = store.list(keys.CHECKPOINTS, limit=CHECKPOINTS_LISTED)
    except ListingTooLong as error:
        refuse(run, keys.CHECKPOINTS, error)
        return
    numbers = {
        info.key: number
        for info in listed
        if (number := keys.parse_checkpoint_manifest(info.key)) is not None
        and number < run.next_round
        and number not in known
        and info.key not in named
    }
    newest = sorted(numbers, key=lambda key: numbers[key])[-at_most:]
    for first in range(0, len(newest), at_once):
        read = read_each(store, CheckpointManifest, newest[first : first + at_once])
        manifests = [m for key, found in read.items() if (m := _checked(run, key, found))]
        model_hash = next((m.model_hash for m in manifests if m.model_hash), "")
        if model_hash and not run.model_hash:
            run.model_hash = clean_text(model_hash, 128)
            Run.objects.filter(pk=run.pk, model_hash="").update(model_hash=run.model_hash)
        Checkpoint.objects.bulk_create(
            (_row(run, manifest, now, final=False) for manifest in manifests),
            ignore_conflicts=True,  # another process has read it
        )


def import_checkpoints(run: Run, store: Store, *, now: datetime) -> None:
    """Store all manifests, reading many at once."""
    ingest_checkpoints(
        run, store, now=now, at_most=MANIFESTS_OF_AN_IMPORT, at_once=MANIFESTS_AT_ONCE
    )


def _checked(
    run: Run, key: str, found: CheckpointManifest | BadRecord
) -> CheckpointManifest | None:
    """The manifest of a key; None, and a refusal, for one that is unreadable or another's."""
    number = keys.parse_checkpoint_manifest(key)
    try:
        if isinstance(found, BadRecord):
            raise found
        check_record(found)
        if found.round != number:
            raise BadRecord(f"expected round {number}, found {found.round}")
    except BadRecord as error:
        refuse(run, key, error)
        return None
    return found


def _row(
    run: Run, manifest: CheckpointManifest | FinalManifest, now: datetime, *, final: bool
) -> Checkpoint:
    return Checkpoint(
        run=run,
        round=manifest.round,
        final=final,
        key=clean_text(manifest.weights.key, 200),
        size_bytes=manifest.weights.size_bytes,
        digest=clean_text(manifest.weights.digest, 64),
        created_at=wall(manifest.wall_s, now),
    )


def store_final(run: Run, store: Store, manifest: FinalManifest, *, now: datetime) -> None:
    """Store the row of the final result, and its sample once the bucket has one."""
    Checkpoint.objects.bulk_create([_row(run, manifest, now, final=True)], ignore_conflicts=True)
    row = Checkpoint.objects.get(run=run, round=manifest.round, final=True)
    if row.sample is not None:
        return
    key = keys.final_sample(manifest.writer.replica, manifest.writer.incarnation)
    try:
        sample = _read_sample(store, manifest, key)
    except BadRecord as error:
        refuse(run, key, error)
        return
    if sample is not None:
        Checkpoint.objects.filter(pk=row.pk, sample__isnull=True).update(sample=sample)


def _read_sample(store: Store, manifest: FinalManifest, key: str) -> dict[str, Any] | None:
    """The sample of the final weights, as stored in the table; None if there is none."""
    if not keys.is_incarnation(manifest.writer.incarnation):
        return None
    try:
        data = store.get_range(key, 0, SAMPLE_LIMIT + 1)
    except MissingKey:
        return None
    if len(data) > SAMPLE_LIMIT:
        raise BadRecord(f"expected at most {SAMPLE_LIMIT} bytes, found more")
    sample = FinalSample.from_bytes(data)
    if sample.round != manifest.round:
        raise BadRecord(f"expected a sample of round {manifest.round}, found {sample.round}")
    return {
        "round": sample.round,
        "prompt": _shown(sample.prompt),
        "text": _shown(sample.text),
        "temperature": finite(sample.temperature),
        "seed": count(sample.seed, "seed"),
        "whole": sample.whole,
    }


def _shown(text: str) -> str:
    return clean_text(_CONTROL.sub("\ufffd", text), SAMPLE_LETTERS)
