"""Builds views of a round for tests of the decision core, and runs the core on them."""

from __future__ import annotations

import dataclasses

from diloco.protocol.records import ContributionRecord, Identity, Plan
from diloco.protocol.round_decision import decide
from diloco.protocol.round_view import Action, DecisionState, MakePlan, RoundView, Totals
from diloco.protocol.settings import GroupSettings

SETTINGS = GroupSettings(num_replicas=3, min_quorum=2, grace_s=60.0, total_rounds=10)


def contribution(replica: int, **changes: object) -> ContributionRecord:
    record = ContributionRecord(
        round=5,
        fragment=0,
        base_round=4,
        base_digest="base",
        replica=replica,
        incarnation="00001-00000000",
        model_hash="model",
        codec="fp32",
        numel=10,
        tokens=100,
        new_tokens=100,
        steps=10,
        rounds=1,
        loss=2.0,
        norm=1.0,
        norms=(1.0,),
        size_bytes=304,
        digest=f"digest{replica}",
        compute_s=1.0,
        encode_s=0.0,
        rounds_here=4,
        wall_s=0.0,
    )
    if "norm" in changes:
        changes.setdefault("norms", (changes["norm"],))
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]


def view(
    me: int, *records: ContributionRecord, expected: str = "012", **changes: object
) -> RoundView:
    seen = RoundView(
        round=5,
        fragment=0,
        me=Identity(replica=me, incarnation="00001-00000000"),
        settings=SETTINGS,
        model_hash="model",
        numel=10,
        tensors=1,
        base_round=4,
        base_digest="base",
        totals=Totals(committed=4, tokens=4000),
        contributions={record.replica: record for record in records},
        expected=frozenset(map(int, expected)),
        live=frozenset(map(int, expected)),
    )
    return dataclasses.replace(seen, **changes)  # type: ignore[arg-type]


class Watch:
    """An observer with its decision state: returns its action at each time."""

    def __init__(self) -> None:
        self.memory = DecisionState()

    def at(self, now_s: float, seen: RoundView) -> Action:
        action, self.memory = decide(seen, self.memory, now_s=now_s, wall_s=0.0, stagger_s=1.0)
        return action


def planned(seen: RoundView) -> Plan:
    action = Watch().at(0, seen)
    assert isinstance(action, MakePlan), action
    return action.plan
