"""Robust planning: impossible values in records, and quorums with replicas in quarantine."""

from __future__ import annotations

import dataclasses
import json

import pytest

from diloco.protocol.records import BadRecord, ContributionRecord, Identity
from diloco.protocol.round_decision import decide
from diloco.protocol.round_planning import screen
from diloco.protocol.round_view import DecisionState, MakePlan, RoundView, Totals, Wait
from diloco.protocol.settings import GroupSettings

SETTINGS = GroupSettings(num_replicas=3, min_quorum=2, weighting="tokens", quarantine_rounds=2)


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
        norm=5.0,
        norms=(3.0, 4.0),
        size_bytes=304,
        digest=f"digest{replica}",
        compute_s=1.0,
        encode_s=0.0,
        rounds_here=4,
        wall_s=0.0,
    )
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]


def view(*records: ContributionRecord, **changes: object) -> RoundView:
    seen = RoundView(
        round=5,
        fragment=0,
        me=Identity(replica=0, incarnation="00001-00000000"),
        settings=SETTINGS,
        model_hash="model",
        numel=10,
        tensors=2,
        base_round=4,
        base_digest="base",
        totals=Totals(committed=4, tokens=4000),
        contributions={record.replica: record for record in records},
    )
    return dataclasses.replace(seen, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        ({"tokens": 10**300}, "expected tokens from 0 to"),
        ({"steps": 10**400}, "expected steps from 0 to"),
        ({"new_tokens": -5}, "expected new tokens from 0 to"),
        ({"compute_s": float("inf")}, "expected compute seconds from 0 to"),
        ({"compute_s": float("nan")}, "expected compute seconds from 0 to"),
        ({"norms": (-3.0, 4.0)}, "expected norm"),
        ({"norms": (1e-300, 4.0)}, "expected norm 4, that of all tensors, found 5"),
        ({"norm": 0.1}, "expected norm 5, that of all tensors, found 0.1"),
        ({"slices": 0}, "expected slices from 1 to 1, found 0"),
        ({"slices": 10**400}, "expected slices from 1 to 1, found 1000"),
    ],
)
def test_impossible_claims_are_refused_and_the_round_continues(
    claim: dict[str, object], words: str
) -> None:
    seen = view(contribution(0), contribution(1), contribution(2, **claim))
    action, _ = decide(seen, DecisionState(), now_s=0.0, wall_s=0.0, stagger_s=1.0)
    assert isinstance(action, MakePlan)
    assert [c.replica for c in action.plan.contributions] == [0, 1]
    (refusal,) = action.plan.refused
    assert refusal.replica == 2 and words in refusal.reason and len(refusal.reason) <= 200


def test_a_number_out_of_the_float_range_is_a_bad_record() -> None:
    body = json.loads(contribution(0).to_bytes()) | {"loss": 10**400}
    with pytest.raises(BadRecord, match="loss: expected a float"):
        ContributionRecord.from_bytes(json.dumps(body).encode())


def test_quarantine_never_keeps_a_round_below_its_quorum() -> None:
    """One of two replicas has died and come back without a saved state; the run must continue with
    it."""
    fresh = contribution(1, rounds_here=0)
    accepted, refused = screen(view(contribution(0), fresh))
    assert [r.replica for r in accepted] == [0, 1] and not refused
    accepted, refused = screen(view(contribution(0), contribution(2), fresh))
    assert [r.replica for r in accepted] == [0, 2]
    assert [r.kind for r in refused] == ["quarantine"]


def test_quarantine_holds_while_another_replica_is_expected() -> None:
    seen = view(contribution(0), contribution(1, rounds_here=0), expected=frozenset({0, 1, 2}))
    action, _ = decide(seen, DecisionState(), now_s=0.0, wall_s=0.0, stagger_s=1.0)
    assert isinstance(action, Wait) and action.why.startswith("quorum 1/2")


def test_quarantine_does_not_wait_for_a_suspected_replica() -> None:
    seen = view(contribution(0), contribution(1, rounds_here=0), expected=frozenset({0, 1, 2}))
    accepted, refused = screen(dataclasses.replace(seen, suspected=frozenset({2})))
    assert [r.replica for r in accepted] == [0, 1] and not refused
