"""The order of the samples of an epoch: a pure function of (seed, epoch, index). No torch.

A *sample* is a window of ``context + 1`` tokens of one shard; sample i of a shard starts at token
``i * context``, so that every token but a shard's first is predicted once an epoch. The tokens at
the end of a shard that do not fill a window are not used.

An epoch visits the shards in a random order, ``mix`` at a time, and the samples of these in a
random order. So a reader holds ``mix`` shards in memory and reads each shard once. Random numbers
are the raw output of Philox, which is the same in every version of NumPy.
"""

from __future__ import annotations

import bisect
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MIX = 4
"""Shards whose samples are mixed, by default."""


class Sample(NamedTuple):
    """Sample ``window`` of the shard with number ``shard``."""

    shard: int
    window: int


class EpochOrder:
    """The order of one epoch. ``counts`` (shards,) are the samples of each shard."""

    def __init__(self, counts: npt.NDArray[np.int64], *, seed: int, epoch: int, mix: int) -> None:
        self._counts = counts
        self._seed, self._epoch, self._mix = seed, epoch, mix
        self._shards = _permutation(seed, epoch, 0, len(counts))
        starts = np.arange(0, len(counts), mix)
        sums = np.add.reduceat(counts[self._shards], starts) if len(counts) else counts
        self._ends: list[int] = np.cumsum(sums).tolist()
        self._mixed = lru_cache(maxsize=2)(self._mix_group)

    @property
    def samples(self) -> int:
        return int(self._ends[-1]) if self._ends else 0

    def group_of(self, position: int) -> int:
        """Return the number of the group of shards that holds the sample at ``position``."""
        return bisect.bisect_right(self._ends, position)

    def shards_of(self, group: int) -> tuple[int, ...]:
        """Return the shards of a group; none after the last one."""
        return tuple(self._shards[group * self._mix : (group + 1) * self._mix].tolist())

    def end_of(self, group: int) -> int:
        """Return the position after the last sample of a group."""
        return self._ends[group]

    def at(self, position: int) -> Sample:
        """Return the sample at ``position``, from 0 to :attr:`samples` - 1."""
        group = self.group_of(position)
        shards, windows = self._mixed(group)
        offset = position - (self._ends[group - 1] if group else 0)
        return Sample(int(shards[offset]), int(windows[offset]))

    def _mix_group(self, group: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        members = np.array(self.shards_of(group), np.int32)
        counts = self._counts[members]
        shards = np.repeat(members, counts)
        windows = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
        order = _permutation(self._seed, self._epoch, group + 1, len(shards))
        return shards[order], windows[order]


def sample_counts(tokens: list[int], context: int) -> npt.NDArray[np.int64]:
    """Return the number of samples of each shard."""
    return np.maximum(np.array(tokens, np.int64) - 1, 0) // context


def _permutation(seed: int, epoch: int, stream: int, size: int) -> npt.NDArray[np.int64]:
    key = np.array([seed % 2**64, 0x746F6B656E73], np.uint64)
    counter = np.array([0, stream, epoch, 0], np.uint64)
    return np.argsort(np.random.Philox(key=key, counter=counter).random_raw(size), kind="stable")
