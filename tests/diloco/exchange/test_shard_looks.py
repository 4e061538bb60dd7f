"""A process that waits for the commit of a sharded round looks for the reduced shards."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from diloco.exchange.round_settlement import LARGE_SHARD_LOOKS, SHARD_LOOKS, RoundSettlement
from tests.diloco.clocks import ManualClock


@pytest.fixture
def observer() -> Mock:
    found = Mock()
    found.commit_of.return_value = None
    found.reduced_shards.return_value = {}
    return found


def waiting(observer: Mock, owners: tuple[int, ...], read_ahead: Mock) -> RoundSettlement:
    """Return a process that has contributed, found a plan with ``owners``, and reduced its part."""
    context = Mock(clock=ManualClock(), round_observer=observer)
    context.reduction.return_value = Mock(read_ahead=read_ahead)
    settlement = RoundSettlement(context, 1, base=Mock(), sent=Mock(), timings=Mock())
    settlement._found(Mock(owners=owners, mode="sharded"))
    settlement._stage = SimpleNamespace(turn=SimpleNamespace(is_due=False))  # type: ignore[assignment]
    settlement._is_committing = True
    return settlement


@pytest.mark.parametrize(
    ("owners", "looks"),
    [((0, 1), SHARD_LOOKS), ((0, 1, 0, 1), LARGE_SHARD_LOOKS)],
    ids=["one shard each", "two shards each"],
)
def test_owners_of_several_shards_look_for_longer(
    observer: Mock, owners: tuple[int, ...], looks: int
) -> None:
    settlement = waiting(observer, owners, Mock(return_value=False))
    for _ in range(2 * looks):
        assert settlement._look_for_commit() is None
    assert observer.reduced_shards.call_count == looks
    assert observer.commit_of.call_count == 2 * looks


def test_the_looks_end_once_all_shards_are_read_ahead(observer: Mock) -> None:
    settlement = waiting(observer, (0, 1, 0, 1), Mock(side_effect=[False, False, True]))
    for _ in range(10):
        settlement._look_for_commit()
    assert observer.reduced_shards.call_count == 3
