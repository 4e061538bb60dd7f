"""Checkpoints and the final result: manifests in the bucket, rows in the table."""

from __future__ import annotations

from datetime import datetime

from diloco.rendezvous import keys
from diloco.rendezvous.records import BadRecord, CheckpointManifest, FinalManifest
from diloco.rendezvous.store import MissingKey, Store
from runs.bucket.reading import check_record, refuse, wall
from runs.models import Checkpoint, Run
from runs.transitions import clean_text


def read_final(store: Store) -> FinalManifest | None:
    """Raises :class:`BadRecord` for one that cannot be read."""
    try:
        manifest = FinalManifest.from_bytes(store.get(keys.FINAL_MANIFEST))
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
            manifest = CheckpointManifest.from_bytes(store.get(info.key))
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


def store_final(run: Run, manifest: FinalManifest, *, now: datetime) -> None:
    Checkpoint.objects.get_or_create(
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
