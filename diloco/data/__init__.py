"""Token shards: tokenized text in a bucket, streamed to the replicas.

:mod:`~diloco.data.shard_index` describes a set of shards, :mod:`~diloco.data.order` the order of an
epoch, :mod:`~diloco.data.shard_reader` reads and checks shards, :mod:`~diloco.data.sample_stream`
and :mod:`~diloco.data.work_units` are the two ways to cover an epoch, and
:class:`~diloco.data.token_shards.TokenShards` is the iterable for a training loop. Only the last
one needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.data.token_shards import TokenShards

__all__ = ["TokenShards"]


def __getattr__(name: str) -> Any:
    if name == "TokenShards":
        from diloco.data.token_shards import TokenShards

        return TokenShards
    raise AttributeError(f"module 'diloco.data' has no attribute {name!r}")
