"""A request that hangs does not keep a replica from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.exchange import inflight_rounds
from diloco.exchange.inflight_rounds import InflightRound, InflightRounds, MissedRound
from diloco.store.base import LocalStore
from diloco.store.multipart import Data
from diloco.training import group as group_module

MakeGroup = Callable[..., Any]


class HangingEnd(LocalStore):
    """The put of a replica's last heartbeat does not return until ``release``."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.release = threading.Event()
        self.hangs = threading.Event()

    def put(self, key: str, data: Data) -> None:
        if key.startswith("members/") and b'"state":"done"' in bytes(data):
            self.hangs.set()
            assert self.release.wait(600)
        super().put(key, data)


def test_a_replica_ends_although_its_last_heartbeat_hangs(
    tiny_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = tiny_group(num_replicas=1, total_rounds=2)
    store = group.store = HangingEnd(group.root)
    wait = group_module.wait

    def until_it_hangs(futures: Any, timeout: float) -> Any:
        while True:
            ended = wait(futures, timeout=0.01)
            if ended.done or store.hangs.is_set():
                return ended

    monkeypatch.setattr(group_module, "wait", until_it_hangs)
    member = group.start(0)
    group.wait()
    assert member.error is None
    assert len(group.commits()) == 2
    store.release.set()
    assert "could not write the end of this process: a request of the store hangs" in caplog.text


def test_rounds_in_flight_end_although_an_exchange_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs, release = threading.Event(), threading.Event()

    def exchange(opened: InflightRound) -> MissedRound:
        hangs.set()
        assert release.wait(600)
        return MissedRound()

    monkeypatch.setattr(inflight_rounds, "ENDED_S", 0.01)
    rounds = InflightRounds(exchange, at_once=1)
    for number in (1, 2):
        rounds.begin(opened(number))
    assert hangs.wait(600)
    assert rounds.end() == []
    assert "the exchange has not ended: a request of the store hangs" in caplog.text
    release.set()


def opened(round: int) -> Any:
    """A round of which only the number matters."""

    class Opened:
        sent = None

    one = Opened()
    one.round = round  # type: ignore[attr-defined]
    return one
