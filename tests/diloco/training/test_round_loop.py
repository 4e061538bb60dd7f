"""The exchange of a round in the background."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from diloco.store.base import StoreUnavailable
from diloco.training.round_loop import RoundLoop


def test_an_error_between_contribution_and_settlement_ends_the_reads_ahead() -> None:
    closed: list[str] = []
    opened = SimpleNamespace(round=1, sent=None, is_awaited=False)

    def contribute(opened: SimpleNamespace, *, settles: bool) -> None:
        assert settles
        opened.sent = SimpleNamespace(close=lambda: closed.append("reads ahead"))

    def fail(**progress: object) -> None:
        raise StoreUnavailable("no route to the bucket")

    loop = SimpleNamespace(
        progress=SimpleNamespace(earlier_contributor=lambda round: None),
        contribute=contribute,
        _lease=SimpleNamespace(update=fail),
        _promised_round=lambda: 1,
    )
    with pytest.raises(StoreUnavailable):
        RoundLoop._exchange_round(loop, opened)  # type: ignore[arg-type]
    assert closed == ["reads ahead"]
