"""Jobs of the exchange on all ranks: results, errors and requests, over a channel in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diloco.errors import ReplicaError
from diloco.exchange.payload_reader import CannotReduce
from diloco.protocol.records import Identity
from diloco.ranks.rank_exchange import RankTeam
from diloco.store.base import LocalStore, StoreError
from diloco.store.metered import MeteredStore

ME = Identity(replica=0, incarnation="00001-00000000")


class Channel:
    """The leader's end; ``others`` are the outcomes of the other ranks."""

    def __init__(self, *others: dict[str, Any]) -> None:
        self.others = others
        self.sent: list[dict[str, Any]] = []

    def text(self, text: str = "") -> str:
        self.sent.append(json.loads(text))
        return text

    def gather(self, text: str) -> list[str]:
        return [text, *map(json.dumps, self.others)]


class Work:
    """The leader's part: returns or raises ``result``."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def do(self, job: dict[str, Any]) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def team(own: Any, *others: dict[str, Any]) -> tuple[RankTeam, Channel, MeteredStore]:
    channel, metered = Channel(*others), MeteredStore(LocalStore(Path("unused")))
    made = RankTeam(Work(own), channel, metered, ME)  # type: ignore[arg-type]
    made.stop()
    return made, channel, metered


def test_results_are_in_the_order_of_the_ranks() -> None:
    made, channel, _ = team("a", {"result": "b"}, {"result": None})
    assert made.run("upload", fragment=2) == ["a", "b", None]
    assert channel.sent == [{"do": "upload", "fragment": 2}]


def test_requests_of_all_ranks_are_counted() -> None:
    others = ({"result": 1, "usage": [3, 10, 20]}, {"result": 1, "usage": [1, 5, 0]})
    made, _, metered = team(1, *others)
    made.run("upload")
    assert vars(metered.usage) == {"requests": 4, "bytes_up": 15, "bytes_down": 20}


@pytest.mark.parametrize(
    ("outcome", "kind", "text"),
    [
        ({"cannot_reduce": [3, "damaged"]}, CannotReduce, "payload of replica 3: damaged"),
        ({"store_error": "no connection"}, StoreError, "rank 1: no connection"),
        ({"error": "KeyError: 'x'"}, ReplicaError, "rank 1: KeyError: 'x'"),
    ],
)
def test_the_error_of_another_rank_is_raised_on_the_leader(
    outcome: dict[str, Any], kind: type[Exception], text: str
) -> None:
    made, *_ = team("a", outcome)
    with pytest.raises(kind, match=text):
        made.run("reduce")


def test_the_own_error_is_raised_after_the_other_ranks_have_answered() -> None:
    made, channel, _ = team(StoreError("own"), {"store_error": "other"})
    with pytest.raises(StoreError, match="own"):
        made.run("reduce")
    assert len(channel.sent) == 1


def test_the_end_is_sent_once_to_all_ranks() -> None:
    made, channel, _ = team("a")
    made.end()
    assert channel.sent == [{"do": "end"}]
