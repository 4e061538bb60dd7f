"""Checkpoints and the final result: manifests in the bucket, rows in the table.

A sample of text from the final weights comes a little after their manifest, or never.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from diloco.rendezvous import keys
from diloco.rendezvous.records import BadRecord, CheckpointManifest, FinalManifest, FinalSample
from diloco.rendezvous.store import MissingKey, Store
from runs.bucket.limits import count, finite
from runs.bucket.reading import check_record, refuse, wall
from runs.models import Checkpoint, Run
from runs.transitions import clean_text

SAMPLE_LIMIT = 16 * 1024
"""Bytes of the record; a replica writes two thousand. A larger one is not read to its end."""
SAMPLE_LETTERS = 2000
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""What has no picture, but for tabs and the ends of lines."""


def read_final(store: Store) -> FinalManifest | None:
    """Raises :class:`BadRecord` for one that cannot be read."""
    try:
        manifest = FinalManifest.read(store, keys.FINAL_MANIFEST)
    except MissingKey:
        return None
    check_record(manifest)
    return manifest


def ingest_checkpoints(run: Run, store: Store, *, now: datetime) -> None:
    """Manifests that are not in the table yet. One listing."""
    known = set(Checkpoint.objects.filter(run=run, final=False).values_list("round", flat=True))
    for info in store.list(keys.CHECKPOINTS):
        number = keys.parse_checkpoint_manifest(info.key)
        if number is None or number in known:
            continue
        try:
            manifest = CheckpointManifest.read(store, info.key)
            check_record(manifest)
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
