"""Checks token shards against a workload, before a run and when a replica starts. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.data.order import sample_counts
from diloco.data.shard_index import BadIndex, ShardIndex, read_index
from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.store.base import MissingKey, Store, StoreError


@dataclass(frozen=True, kw_only=True)
class ShardNeeds:
    """The shards that a workload needs. ``vocabulary`` (tokens of the model) and ``digest`` (of the
    tokenizer) are None where they are not known yet. ``parts``: an epoch is divided into so many;
    each needs a batch of ``batch_size`` samples of ``context`` tokens."""

    context: int
    parts: int
    batch_size: int
    vocabulary: int | None = None
    digest: str | None = None


def open_index(store: Store, needs: ShardNeeds) -> ShardIndex:
    """The index of the shards in ``store``, which meet the needs and can be read. Raises
    :class:`SettingsError` on ``data``, with the expected and the found value."""
    index = read_shards(store)
    try:
        check_index(index, needs)
    except BadIndex as error:
        raise SettingsError("data", f"{store.uri}: {error}") from error
    return index


def read_shards(store: Store) -> ShardIndex:
    """Read the index of the shards in ``store``, and one byte of the first shard of each split.
    Raises :class:`SettingsError` on ``data``."""
    try:
        index = read_index(store)
        if not (index.train and index.held_out):
            counts = f"{len(index.train)} and {len(index.held_out)}"
            raise BadIndex(
                f"expected a shard for training and one held out, found {counts}. Tokenize again "
                "with another --held-out"
            )
        for shard in (index.train[0], index.held_out[0]):
            if not store.get_range(shard.name, 0, 1):
                raise BadIndex(f"shard {shard.name}: expected tokens, found an empty object")
    except MissingKey as error:
        raise SettingsError(
            "data", f"{store.uri}: expected the shard {error}, found no object"
        ) from error
    except (StoreError, BadIndex) as error:
        raise SettingsError("data", f"{store.uri}: {error}") from error
    return index


def check_index(index: ShardIndex, needs: ShardNeeds) -> None:
    """Raise :class:`BadIndex` if the shards do not meet the needs."""
    if needs.vocabulary is not None and index.vocabulary > needs.vocabulary:
        raise BadIndex(
            f"expected tokens for a model of {needs.vocabulary:,}, found {index.vocabulary:,} of "
            f"the tokenizer {index.tokenizer!r}. Tokenize with the model's tokenizer"
        )
    if needs.digest is not None and index.tokenizer_digest != needs.digest:
        raise BadIndex(
            f"expected shards of the workload's tokenizer ({needs.digest[:12]}), found those of "
            f"{index.tokenizer!r} ({index.tokenizer_digest[:12]}). Tokenize with this tokenizer"
        )
    samples = sum(sample_counts([shard.tokens for shard in index.train], needs.context).tolist())
    needed = needs.parts * needs.batch_size
    if samples < needed:
        raise BadIndex(
            f"expected at least {needed:,} samples of {needs.context + 1:,} tokens, a batch for "
            f"each of {needs.parts:,} parts, found {samples:,} in {index.tokens:,} tokens"
        )
    if not any(shard.tokens > needs.context for shard in index.held_out):
        raise BadIndex(
            f"expected a held-out shard of {needs.context + 1:,} tokens, found "
            f"{max((shard.tokens for shard in index.held_out), default=0):,}. Tokenize again with "
            "a larger --held-out"
        )


def check_settings(settings: GroupSettings) -> None:
    """Raise :class:`SettingsError` for settings of a group that work units do not support."""
    if settings.num_fragments > 1:
        raise SettingsError(
            "num_fragments",
            f"expected 1 with work units, because a round contains a part of the steps otherwise, "
            f"found {settings.num_fragments}",
        )
