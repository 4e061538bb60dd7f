"""Checkpoints and the final result: manifests in the bucket, rows in the table.

A sample of text from the final weights comes a little after their manifest, or never.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from diloco.protocol import keys
from diloco.protocol.records import BadRecord, CheckpointManifest, FinalManifest, FinalSample
from diloco.store.base import ListingTooLong, MissingKey, Store
from runs.ingest.limits import count, finite
from runs.ingest.validation import check_record, refuse, wall
from runs.models import Checkpoint, Event, Round, Run
from runs.states import RoundState
from runs.transitions import clean_text

MANIFESTS_PER_TICK = 50
MANIFESTS_OF_AN_IMPORT = 10_000
CHECKPOINTS_LISTED = 50_000
"""Objects. The weights of all but the newest are swept, their manifests are not."""
SAMPLE_LIMIT = 16 * 1024
"""Bytes of the record; a replica writes two thousand. A larger one is not read to its end."""
SAMPLE_LETTERS = 2000
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""What has no picture, but for tabs and the ends of lines."""


def read_final(run: Run, store: Store) -> FinalManifest | None:
    """None where there is none, or its round's commit is in the bucket and not ingested yet.

    Raises :class:`BadRecord` for one that cannot be read, or that no commit stands behind: whoever
    can write to the bucket could end the run with it.
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
    run: Run, store: Store, *, now: datetime, at_most: int = MANIFESTS_PER_TICK
) -> None:
    """Manifests that are not in the table yet, of rounds whose commits have been ingested: at most
    ``at_most``, the newest first. One listing."""
    known = set(Checkpoint.objects.filter(run=run, final=False).values_list("round", flat=True))
    refused = Event.objects.filter(run=run, kind="refused", message__startswith=keys.CHECKPOINTS)
    named = {message.split(" ", 1)[0] for message in refused.values_list("message", flat=True)}
    try:
        listed = store.list(keys.CHECKPOINTS, limit=CHECKPOINTS_LISTED)
    except ListingTooLong as error:
        refuse(run, keys.CHECKPOINTS, error)
        return
    found = [
        (number, info)
        for info in listed
        if (number := keys.parse_checkpoint_manifest(info.key)) is not None
        and number < run.next_round
        and number not in known
        and info.key not in named
    ]
    for number, info in sorted(found, key=lambda one: one[0])[-at_most:]:
        try:
            manifest = CheckpointManifest.read(store, info.key)
            check_record(manifest)
            if manifest.round != number:
                raise BadRecord(f"expected round {number}, found {manifest.round}")
        except MissingKey:
            continue
        except BadRecord as error:
            refuse(run, info.key, error)
            continue
        if not run.model_hash:
            run.model_hash = clean_text(manifest.model_hash, 128)
            Run.objects.filter(pk=run.pk, model_hash="").update(model_hash=run.model_hash)
        Checkpoint.objects.get_or_create(
            run=run,
            round=number,
            final=False,
            defaults={
                "key": clean_text(manifest.weights.key, 200),
                "size_bytes": manifest.weights.size_bytes,
                "digest": clean_text(manifest.weights.sha256, 64),
                "created_at": wall(manifest.wall_s, now),
            },
        )


def store_final(run: Run, store: Store, manifest: FinalManifest, *, now: datetime) -> None:
    """The result's row, and its sample as soon as there is one."""
    row, _ = Checkpoint.objects.get_or_create(
        run=run,
        round=manifest.round,
        final=True,
        defaults={
            "key": clean_text(manifest.weights.key, 200),
            "size_bytes": manifest.weights.size_bytes,
            "digest": clean_text(manifest.weights.sha256, 64),
            "created_at": wall(manifest.wall_s, now),
        },
    )
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
    """Of the result that the manifest names, as the table takes it."""
    if not keys.is_incarnation(manifest.writer.incarnation):
        return None
    try:
        data = store.get_range(key, 0, SAMPLE_LIMIT + 1)
    except MissingKey:
        return None
    if len(data) > SAMPLE_LIMIT:
        raise BadRecord(f"expected at most {SAMPLE_LIMIT} bytes, found more")
    found = FinalSample.from_bytes(data)
    if found.round != manifest.round:
        raise BadRecord(f"expected a sample of round {manifest.round}, found {found.round}")
    return {
        "round": found.round,
        "prompt": _shown(found.prompt),
        "text": _shown(found.text),
        "temperature": finite(found.temperature),
        "seed": count(found.seed, "seed"),
        "whole": found.whole,
    }


def _shown(text: str) -> str:
    return clean_text(_CONTROL.sub("\ufffd", text), SAMPLE_LETTERS)
