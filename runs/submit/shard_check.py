"""Checks the token shards of a draft: readable, for this model, and enough of them."""

from __future__ import annotations

from collections.abc import Sequence

from diloco.data.shard_check import ShardNeeds, check_settings, open_index
from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.protocol.workload import (
    BY_UNITS,
    BYTES,
    VOCABULARY,
    ByteGPTWorkload,
    HuggingFaceWorkload,
)
from diloco.store.base import StoreError
from diloco.store.open import open_store
from runs.redaction import redact
from runs.submit.bucket_check import local_address, remote_backends
from runs.submit.data_check import refuse_data


def check_shards(
    workload: ByteGPTWorkload | HuggingFaceWorkload,
    settings: GroupSettings,
    backends: Sequence[str] = (),
) -> list[str]:
    """The problems of a draft's token shards; an empty list means success.

    Reads the index and one byte of a shard of each split, without retries.
    """
    uri = workload.data
    if local := local_address(uri, backends):
        names = ", ".join(remote_backends(backends))
        return [
            f"expected token shards that replicas on {names} can reach, "
            f"found {local}, which only this machine can"
        ]
    if problem := refuse_data(uri):
        return [problem]
    try:
        if workload.data_coverage == BY_UNITS:
            check_settings(settings)
    except SettingsError as error:
        return [f"work units: {error}"]
    try:
        open_index(open_store(uri), needs_of(workload, settings))
    except (SettingsError, StoreError) as error:
        message = error.message if isinstance(error, SettingsError) else f"{uri}: {error}"
        return [redact(message)]
    return []


def needs_of(
    workload: ByteGPTWorkload | HuggingFaceWorkload, settings: GroupSettings
) -> ShardNeeds:
    """The shards that a workload needs. A model on the Hub is read by the replicas only, so its
    vocabulary and its tokenizer are not known here."""
    vocabulary: int | None
    digest: str | None
    if isinstance(workload, ByteGPTWorkload):
        context, vocabulary, digest = workload.shape.context, VOCABULARY, BYTES
    else:
        given = workload.config.get("vocab_size")
        context = workload.context
        vocabulary = given if isinstance(given, int) else None
        digest = BYTES if workload.tokenizer_name == BYTES else None
    return ShardNeeds(
        context=context,
        parts=settings.max_replicas,
        batch_size=settings.batch_size,
        vocabulary=vocabulary,
        digest=digest,
    )
