"""Checks the token shards of drafts: readable, for this model, and enough of them.

:func:`read_shards` calls the store, once for all drafts with these shards; :func:`shard_problem` is
pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco.data import shard_check
from diloco.data.shard_check import ShardNeeds, check_settings
from diloco.data.shard_index import BadIndex, ShardIndex
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


def read_shards(uri: str, backends: Sequence[str] = ()) -> ShardIndex:
    """Read the index of token shards, and one byte of a shard of each split, without retries.
    Raises ``ValueError`` with the problem."""
    if local := local_address(uri, backends):
        names = ", ".join(remote_backends(backends))
        raise ValueError(
            f"expected token shards that replicas on {names} can reach, "
            f"found {local}, which only this machine can"
        )
    if problem := refuse_data(uri):
        raise ValueError(problem)
    try:
        return shard_check.read_shards(open_store(uri))
    except SettingsError as error:
        raise ValueError(redact(error.message)) from error
    except StoreError as error:
        raise ValueError(redact(f"{uri}: {error}")) from error


def shard_problem(
    index: ShardIndex, workload: ByteGPTWorkload | HuggingFaceWorkload, settings: GroupSettings
) -> str:
    """Why a run cannot train on the shards of ``index``; '' if it can."""
    try:
        if workload.data_coverage == BY_UNITS:
            check_settings(settings)
    except SettingsError as error:
        return f"work units: {error}"
    try:
        shard_check.check_index(index, needs_of(workload, settings))
    except BadIndex as error:
        return redact(f"{workload.data}: {error}")
    return ""


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
