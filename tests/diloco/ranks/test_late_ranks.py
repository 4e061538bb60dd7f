"""A late replica of several ranks, which are threads here, keeps the bits of one process."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from diloco.clock import SystemClock
from diloco.exchange.reduce import Merged
from diloco.model.flat_parameters import Layout
from diloco.protocol.records import Commit, Identity
from diloco.protocol.round_view import Totals
from diloco.protocol.settings import GroupSettings
from diloco.ranks.rank_progress import RankProgress
from diloco.ranks.sliced_layout import SlicedLayout
from diloco.training.checkpoint import Restored, Vectors
from diloco.training.late_share import ALL, NOTHING, Kept
from diloco.training.local_progress import LocalProgress
from tests.diloco.ranks.rank_threads import ME, RankChannels, three_links

SETTINGS = GroupSettings(warmup_steps=0)
OTHER = Identity(replica=1, incarnation="00001-00000000")
COMMIT = Commit(
    round=1,
    fragment=0,
    committer=OTHER,
    contributors=(OTHER,),
    void="",
    tokens_total=1,
    committed_total=1,
    wall_s=0.0,
)


def model() -> nn.Module:
    """Its averaged buffers are in the middle of the vector."""
    return nn.Sequential(
        nn.Linear(1031, 1031, bias=False), nn.BatchNorm1d(1031), nn.Linear(1031, 1031, bias=False)
    )


NUMEL = Layout(model(), buffers=True).numel


def vector(seed: int) -> Tensor:
    return torch.rand(NUMEL, generator=torch.Generator().manual_seed(seed))


def held(layout: Layout, whole: Tensor) -> Tensor:
    parts = [whole[span.start : span.stop] for span, _ in layout.held_parts(layout.span(None))]
    return torch.cat(parts)


def after_a_late_round(progress: LocalProgress, *, contributed: bool) -> Tensor:
    """Return the held local weights after a round without the second contribution of two."""
    layout = progress.state.layout
    base = held(layout, vector(0))
    if isinstance(progress, RankProgress):
        progress.state.read = Vectors(weights=base, outer={}, committed=0)
    progress.state.load(
        Restored(round=0, weights=base, base_rounds=(0,), totals=Totals()), commit=None
    )
    progress.counter.begin_round()
    layout.write(base - held(layout, vector(1)))
    opened = None
    for _ in range(2):
        progress.counter.count(tokens=1, loss=0.0)
        opened = progress.open(1, 0)
    mean = held(layout, vector(1) + vector(2))
    own = opened if contributed else None
    outcome = progress.apply(COMMIT, Merged(vector=mean), own, keep=Kept(0.25))
    assert outcome == "late"
    return layout.read()


@pytest.mark.parametrize("contributed", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_drop_the_same_component(size: int, contributed: bool) -> None:
    layout = Layout(model(), buffers=True)
    alone = LocalProgress(ME, SETTINGS, layout, SystemClock())
    expected = after_a_late_round(alone, contributed=contributed)
    links = three_links(size)

    def run(rank: int) -> tuple[SlicedLayout, Tensor]:
        channels: Any = RankChannels(links, rank)
        sliced = SlicedLayout(model(), channels.channel, buffers=True)
        progress = RankProgress(ME, SETTINGS, sliced, SystemClock(), channels)
        return sliced, after_a_late_round(progress, contributed=contributed)

    with ThreadPoolExecutor(size) as pool:
        ranks = list(pool.map(run, range(size)))
    for sliced, local in ranks:
        assert torch.equal(local, held(sliced, expected))
    assert sum(local.numel() for _, local in ranks) == NUMEL


@pytest.mark.parametrize("keep", [Kept(0.25), ALL, NOTHING], ids=str)
def test_followers_keep_what_their_leader_keeps(
    monkeypatch: pytest.MonkeyPatch, keep: Kept
) -> None:
    sent: list[str] = []
    kept: list[Kept] = []

    class Announcing(RankChannels):
        def announced(self, call: str, **arguments: Any) -> Any:
            sent.append(json.dumps(arguments))
            return super().announced(call)

    monkeypatch.setattr(LocalProgress, "apply", lambda *given, keep: kept.append(keep))
    links = three_links(2)
    for rank in (0, 1):
        channels: Any = Announcing(links, rank)
        layout: Any = mock.create_autospec(Layout, held_numel=4, held_averaged=())
        progress = RankProgress(ME, SETTINGS, layout, SystemClock(), channels)
        if rank == 0:
            progress.apply(COMMIT, None, None, keep=keep)
        else:
            progress.follow("apply", json.loads(sent[0]))
    assert kept == [keep, keep]
