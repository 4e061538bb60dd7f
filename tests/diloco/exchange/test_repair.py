"""A reader of a damaged payload gives its writer time to upload it again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco.exchange.payload_reader import REPAIR_BYTES_PER_S, REPAIR_S, CannotReduce
from diloco.exchange.reduce import Reduction
from diloco.exchange.timings import Timings
from diloco.protocol import keys
from diloco.protocol.settings import GroupSettings
from diloco.store.base import LocalStore
from tests.diloco.clocks import ManualClock
from tests.diloco.exchange.test_reduce import INCARNATION, SLOTS, contribute, plan


def damaged(root: Path, *, is_repaired: bool) -> tuple[Reduction, ManualClock]:
    """Return the reduction of a damaged payload, which its writer repairs in the first pause."""
    store = LocalStore(root)
    contributions = contribute(store, 0, 1.0, 2.0, 3.0), contribute(store, 1, 5.0, 6.0, 7.0)
    key = keys.contribution_payload(1, 1, INCARNATION)
    body = store.get(key)
    wrong = body[:-1] + bytes([body[-1] ^ 1])
    store.put(key, wrong)
    clock = ManualClock(lambda: store.put(key, body if is_repaired else wrong))
    reduction = Reduction(
        store, GroupSettings(), plan(*contributions), SLOTS, timings=Timings(clock)
    )
    return reduction, clock


def test_the_last_read_waits_for_the_repair(tmp_path: Path) -> None:
    reduction, clock = damaged(tmp_path, is_repaired=True)
    assert torch.equal(reduction.gather().vector, torch.tensor([3.0, 4.0, 5.0]))
    upload_s = (3 * 4 + 8) / REPAIR_BYTES_PER_S
    assert clock.pauses == [pytest.approx(REPAIR_S + upload_s)]


def test_a_payload_that_stays_damaged_is_named_after_one_wait(tmp_path: Path) -> None:
    reduction, clock = damaged(tmp_path, is_repaired=False)
    with pytest.raises(CannotReduce, match="payload of replica 1: expected checksum"):
        reduction.gather()
    assert len(clock.pauses) == 1
