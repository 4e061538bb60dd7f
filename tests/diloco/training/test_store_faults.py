"""Random faults and kills: all survivors end with equal weights and a complete log.

A state machine starts replicas on stores that lose, delay, tear, duplicate and reorder requests,
kills them at any moment and continues the run. The replicas are complete ones, in threads. At the
end another replica finishes the run on a store without faults.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.diloco.faulty_store import Faults

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"  # threads of a killed member
)

BAD_NETWORK = Faults(
    drop=0.03, lose=0.03, delay=0.03, duplicate=0.03, tear=0.03, late=0.02, delay_s=2.0
)
ROUNDS = 6
REPLICAS = range(4)


class Runs(RuleBasedStateMachine):
    """The test sets ``group_class`` from its fixture."""

    group_class: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.group: Any = None
        self.running: dict[int, Any] = {}

    @initialize(
        plan=st.sampled_from(["gather", "sharded"]),
        codec=st.sampled_from(["fp32", "bf16", "int8", "topk"]),
        shape=st.sampled_from([(1, 0), (1, 2), (2, 0), (2, 3), (4, 3)]),
        late=st.sampled_from([0.0, 0.5, 1.0]),
        quorum=st.integers(1, 2),
    )
    def create(
        self, plan: str, codec: str, shape: tuple[int, int], late: float, quorum: int
    ) -> None:
        fragments, overlap = shape
        self.group = self.group_class(
            self.folder / "run",
            reduce_plan=plan,
            codec=codec,
            num_fragments=fragments if fragments < 3 else 2,
            overlap_steps=overlap,
            late_keep=late,
            sync_every=4,
            total_rounds=ROUNDS,
            num_replicas=2,
            min_quorum=quorum,
            start_wait_s=5.0,
            grace_s=20.0,
            heartbeat_timeout_s=30.0,
            state_every=2,
            checkpoint_every=100,  # nothing is swept, so that the log can be replayed by hand
        )

    @rule(replica=st.sampled_from(REPLICAS))
    def start(self, replica: int) -> None:
        if replica not in self.running:
            self.running[replica] = self.group.start(replica, faults=BAD_NETWORK)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def kill(self, data: Any) -> None:
        member = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        member.store.dead = True

    @precondition(lambda self: self.running)
    @rule()
    def go_on(self) -> None:
        """Until there is another commit, or none can follow."""
        before = len(self.group.commits())
        while len(self.group.commits()) == before:
            alive = [m.thread for m in self.running.values() if m.thread.is_alive()]
            if len(alive) < self.group.settings.min_quorum:
                break
            alive[0].join(0.02)

    def teardown(self) -> None:
        try:
            if self.group is not None:
                self.see_it_through()
        finally:
            for member in self.group.members if self.group else ():
                member.store.dead = True
            shutil.rmtree(self.folder, ignore_errors=True)

    def see_it_through(self) -> None:
        group = self.group
        witnesses = [group.start(number) for number in (8, 9)]
        group.wait(*witnesses, *self.running.values())
        commits = group.assert_log()
        assert commits[-1].committed_total == ROUNDS
        group.assert_agreed(*witnesses)
        expected = group.replayed()
        assert torch.equal(witnesses[0].weights(), expected)
        for member in self.running.values():
            if member.error is None:
                assert torch.equal(member.weights(), expected)


@pytest.mark.slow
def test_every_survivor_ends_with_the_same_weights(tiny_group_class: Any) -> None:
    Runs.group_class = tiny_group_class
    Runs.TestCase.settings = settings(
        max_examples=8,
        stateful_step_count=8,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    Runs.TestCase().runTest()
