"""Small sets of token shards for tests."""

from __future__ import annotations

import numpy as np

from diloco.data.shard_index import INDEX, ShardIndex, dtype_of
from diloco.data.shard_writer import PartWriter
from diloco.store.base import Store


def write_shards(
    store: Store, *, shards: int = 4, tokens: int = 40, vocabulary: int = 60_000
) -> ShardIndex:
    """Write shards whose tokens are 0, 1, 2, ... over all shards, and the index."""
    dtype = dtype_of(vocabulary)
    writer = PartWriter(store, 0, dtype=dtype, shard_tokens=tokens)
    numbers = np.arange(shards * tokens) % vocabulary
    for document in np.split(numbers, shards * 2):
        writer.add(document.astype(dtype), split="train", ends=True)
    writer.add((np.arange(tokens) % vocabulary).astype(dtype), split="held_out", ends=True)
    part = writer.close()
    index = ShardIndex(
        tokenizer="bytes",
        tokenizer_digest="bytes",
        vocabulary=vocabulary,
        end=None,
        train=part.train,
        held_out=part.held_out,
    )
    store.put(INDEX, index.to_bytes())
    return index
